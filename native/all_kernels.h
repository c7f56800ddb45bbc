// Every kernel, compiled once for each instruction set: define COTERIE_ISA and include this.
#include "kernels.h"

#include "backward.h"
#include "decode.h"
#include "decode_all.h"
#include "finish.h"
#include "forward.h"
#include "halving.h"
#include "hashing.h"
#include "kmeans.h"
#include "kmeans_hamming.h"
#include "means.h"
#include "near_far.h"
#include "near_keys.h"
#include "top_keys.h"

namespace coterie::COTERIE_ISA {

inline Kernels all_kernels(const char* name) {
    return {
        .name = name,
        .forward = forward,
        .backward = backward,
        .decode = decode,
        .decode_all = decode_all,
        .finish = finish,
        .means = means,
        .means_backward = means_backward,
        .planning =
            {
                .order_by = order_by,
                .group_by = group_by,
                .smyrf_orders = smyrf_orders,
                .cross_polytope = cross_polytope,
                .kmeans = kmeans,
                .halve = halve,
                .hamming_kmeans = hamming_kmeans,
                .cluster_means = cluster_means,
                .top_keys = top_keys,
                .near_keys = near_keys,
                .near_far = near_far,
            },
    };
}

}  // namespace coterie::COTERIE_ISA
