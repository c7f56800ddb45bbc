#include "planning.h"

namespace coterie {

void register_planning(nanobind::module_&) {}

}  // namespace coterie
