#define COTERIE_ISA avx512
#include "all_kernels.h"

const coterie::Kernels& coterie::avx512_kernels() {
    static const Kernels kernels = avx512::all_kernels("avx512");
    return kernels;
}
