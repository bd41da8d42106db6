#include "comm_core/samples.hpp"
#include "register.hpp"

namespace comm_core::bindings {
namespace {

std::span<const std::int64_t> places_at(std::uintptr_t address, std::size_t count) {
  return {reinterpret_cast<const std::int64_t*>(address), count};
}

}  // namespace

void register_samples(py::module_& m) {
  m.def(
      "take_samples",
      [](std::uintptr_t kept, std::uintptr_t source, std::uintptr_t places, std::size_t count, std::size_t itemsize) {
        take_samples(reinterpret_cast<std::byte*>(kept), reinterpret_cast<const std::byte*>(source),
                     places_at(places, count), itemsize);
      },
      py::arg("kept"), py::arg("source"), py::arg("places"), py::arg("count"), py::arg("itemsize"),
      "kept[i] = source[places[i]], by addresses; `places` are `count` int64, elements have `itemsize` bytes.");
  m.def(
      "changed_sample",
      [](std::uintptr_t kept, std::uintptr_t source, std::uintptr_t places, std::size_t count, std::size_t itemsize) {
        return changed_sample(reinterpret_cast<const std::byte*>(kept), reinterpret_cast<const std::byte*>(source),
                              places_at(places, count), itemsize);
      },
      py::arg("kept"), py::arg("source"), py::arg("places"), py::arg("count"), py::arg("itemsize"),
      "The first i where source[places[i]] has other bytes than kept[i], -1 where there is none.");
}

}  // namespace comm_core::bindings
