"""The CPU's name, as the system tells it."""

from __future__ import annotations

import platform

from coterie.machine import cpu


def test_generations_of_one_name_are_told_apart(tmp_path):
    info = tmp_path / "cpuinfo"
    core = "processor : {}\ncpu family : {}\nmodel : 2\nmodel name : AMD EPYC\n"
    info.write_text(core.format(0, 26) + "\n" + core.format(1, 25))
    assert cpu(info) == "AMD EPYC (family 26, model 2)"


def test_a_name_alone(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text("model name : Abacus 1\n")
    assert cpu(info) == "Abacus 1"
    assert cpu(tmp_path / "none") == (platform.processor() or platform.machine())
