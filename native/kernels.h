// The kernels of each instruction set, and the choice between them.
#pragma once

#include <string>

#include "arrays.h"
#include "planning.h"

namespace coterie {

struct Kernels {
    const char* name;
    void (*forward)(const Call&, const Forward&);
    void (*backward)(const Call&, Backward&);
    void (*decode)(const DecodeCall&);
    void (*decode_all)(const AllKeysCall&);
    void (*finish)(const FinishCall&);
    void (*means)(const Segments&, const Rows&, float*);
    void (*means_backward)(const Segments&, Gradient&);
    PlanningKernels planning;
};

const Kernels& portable_kernels();
// Only where COTERIE_X86 is defined:
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

// The best that this CPU runs, or the one that COTERIE_ISA in the environment names.
const Kernels& kernels();

// Throw Malformed if an index is out of range.
void check_parts(const Parts& parts, const Rows& x);
void check_near(const NearCall& call, bool wide);

// Fresh memory that is about to be written all over: large pages spare the faults, and later the look-ups.
void prefer_large_pages(void* memory, int64_t bytes);

// Check the plan, form its virtual rows, and run.
void run_forward(Call& call, const Forward& result);
void run_backward(Call& call, Backward& result);

}  // namespace coterie
