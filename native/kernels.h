// The kernels of each instruction set, and the choice between them.
#pragma once

#include <string>

#include "arrays.h"
#include "planning.h"

namespace coterie {

struct Kernels {
    const char* name;
    void (*forward)(const Call&, const Forward&);
    void (*backward)(const Call&, const Backward&);
    void (*means)(const Segments&, const Rows&, float*);
    void (*means_backward)(const Segments&, const float*, int64_t rows, int64_t dim, float*);
    PlanningKernels planning;
};

const Kernels& portable_kernels();
// Only where COTERIE_X86 is defined:
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

// The best that this CPU runs, or the one that COTERIE_ISA in the environment names.
const Kernels& kernels();

}  // namespace coterie
