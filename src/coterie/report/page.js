// Draw the figures in the colours of the theme, and again when it changes.
const root = document.documentElement;
const { figures, meetings } = JSON.parse(document.getElementById("data").textContent);
const preference = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : preference.matches;
}

function draw() {
  const ink = isDark() ? "#e8ebf0" : "#1c2330";
  const line = isDark() ? "#313a47" : "#d9dde3";
  const clear = "rgba(0,0,0,0)";
  for (const [id, figure] of Object.entries(figures)) {
    const layout = { ...figure.layout, paper_bgcolor: clear, plot_bgcolor: clear, font: { color: ink } };
    layout.modebar = { bgcolor: clear, color: line, activecolor: ink };
    delete layout.template;
    for (const axis of ["xaxis", "yaxis", "yaxis2"]) {
      if (axis in layout) layout[axis] = { ...layout[axis], gridcolor: line, zerolinecolor: line };
    }
    Plotly.react(id, figure.data, layout, { responsive: true, displaylogo: false });
  }
}

document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  draw();
});
document.getElementById("module")?.addEventListener("change", (event) => {
  figures.meetings.data[0].z = meetings[event.target.value];
  draw();
});
preference.addEventListener("change", draw);
draw();
