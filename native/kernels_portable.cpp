#define COTERIE_ISA portable
#include "all_kernels.h"

const coterie::Kernels& coterie::portable_kernels() {
    static const Kernels kernels = portable::all_kernels("portable");
    return kernels;
}
