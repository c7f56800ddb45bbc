// Every kernel, compiled once for each instruction set: define COTERIE_ISA and include this.
#include "kernels.h"

#include "backward.h"
#include "forward.h"
#include "hamming.h"
#include "hashes.h"
#include "kmeans.h"
#include "means.h"
#include "near_keys.h"
#include "polytope.h"
#include "top_keys.h"

namespace coterie::COTERIE_ISA {

inline Kernels all_kernels(const char* name) {
    return {
        name,
        forward,
        backward,
        means,
        means_backward,
        {order_by, group_by, smyrf_orders, kmeans, hamming_kmeans, cluster_means, top_keys, near_keys, cross_polytope},
    };
}

}  // namespace coterie::COTERIE_ISA
