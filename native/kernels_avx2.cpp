#define COTERIE_ISA avx2
#include "all_kernels.h"

const coterie::Kernels& coterie::avx2_kernels() {
    static const Kernels kernels = avx2::all_kernels("avx2");
    return kernels;
}
