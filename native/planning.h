// Planning kernels: hashing and sorting, k-means, top keys.
#pragma once

#include <nanobind/nanobind.h>

namespace coterie {

void register_planning(nanobind::module_& m);

}  // namespace coterie
