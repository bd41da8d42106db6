#include "memory.hpp"

#include <atomic>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "comm_core/errors.hpp"
#include "comm_core/process.hpp"

namespace comm_core::bindings {
namespace {

struct Objects {
  std::vector<PyObject*> owners;
  std::vector<Py_buffer> views;
};

/// The engine's thread lets go of objects without the GIL, and must never wait for it: a computation that holds the GIL
/// would stall the transfer. Objects therefore queue here until some Python thread comes along ([Note: finalizers]);
/// the interpreter is asked to come by itself soon.
class Graveyard {
 public:
  void bury(std::unique_ptr<Objects> objects) noexcept {
    if (gone_ || in_forked_child()) {
      static_cast<void>(objects.release());
      return;
    }
    bool was_empty = false;
    {
      const std::lock_guard lock(mutex_);
      was_empty = dead_.empty();
      dead_.push_back(std::move(objects));
    }
    if (was_empty) Py_AddPendingCall([](void*) { return release_finished(), 0; }, nullptr);
  }

  void release() noexcept {
    if (in_forked_child()) return;
    std::vector<std::unique_ptr<Objects>> dead;
    {
      const std::lock_guard lock(mutex_);
      dead.swap(dead_);
    }
    for (const auto& objects : dead) drop(*objects);
  }

  static void drop(Objects& objects) noexcept {
    for (auto& view : objects.views) PyBuffer_Release(&view);
    for (auto* owner : objects.owners) Py_DECREF(owner);
  }

  void close() noexcept { gone_ = true; }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Objects>> dead_;
  std::atomic<bool> gone_{false};
};

Graveyard& graveyard() {
  static auto* const instance = new Graveyard;  // outlives every thread
  return *instance;
}

DType dtype_of(const Py_buffer& view, const char* name) {
  std::string_view format = view.format == nullptr ? "B" : view.format;
  const std::string shown(format);
  if (!format.empty() && std::string_view("@=<").find(format.front()) != std::string_view::npos)
    format.remove_prefix(1);
  const auto size = view.itemsize;
  if (format == "?") return DType::kBool;
  if (format == "e") return DType::kFloat16;
  if (format == "f") return DType::kFloat32;
  if (format == "d") return DType::kFloat64;
  if (format == "B") return DType::kUInt8;
  if (format == "b") return DType::kInt8;
  if (format.size() == 1 && std::string_view("hilqn").find(format) != std::string_view::npos) {
    if (size == 2) return DType::kInt16;
    if (size == 4) return DType::kInt32;
    if (size == 8) return DType::kInt64;
  }
  throw Unsupported(std::string(name) + ": elements of buffer format '" + shown + "' (" + std::to_string(size) +
                    " bytes) cannot be transferred; pass a comm_core.Buffer that says how to read them");
}

/// Reductions read whole elements. Operations that only copy need no alignment, but one rule serves all.
void require_aligned(std::uintptr_t address, std::int64_t count, DType dtype, const char* name) {
  const auto size = item_size(dtype);
  const auto beyond = address % size;
  if (beyond == 0 || count == 0) return;
  throw InvalidUsage(std::string(name) + ": the address is " + std::to_string(beyond) +
                     " bytes beyond a multiple of the element size " + std::to_string(size) + "; pass an aligned copy");
}

}  // namespace

struct Arguments::Held {
  std::unique_ptr<Objects> objects = std::make_unique<Objects>();

  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() {
    if (objects) graveyard().bury(std::move(objects));
  }
};

Arguments::Arguments() : held_(std::make_shared<Held>()) { release_finished(); }

Arguments::~Arguments() {
  // Where the operation is over, or was refused, nobody else holds them, and nobody will.
  if (held_.use_count() == 1) Graveyard::drop(*std::exchange(held_->objects, nullptr));
  held_.reset();
  release_finished();
}

Buffer Arguments::view(const py::object& object, const char* name) {
  if (py::isinstance<PyBuffer>(object)) {
    Py_INCREF(object.ptr());
    held_->objects->owners.push_back(object.ptr());
    return object.cast<const PyBuffer&>().buffer;
  }
  if (PyObject_CheckBuffer(object.ptr()) == 0) {
    throw InvalidUsage(std::string(name) + ": expected a comm_core.Buffer or an object with the buffer protocol, got " +
                       Py_TYPE(object.ptr())->tp_name);
  }
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_RECORDS_RO) != 0) {
    const py::error_already_set why;
    throw InvalidUsage(std::string(name) + ": " + why.what());
  }
  held_->objects->views.push_back(view);
  if (PyBuffer_IsContiguous(&view, 'C') == 0) throw InvalidUsage(std::string(name) + " is not C-contiguous");
  const DType dtype = dtype_of(view, name);
  const auto count = view.len / view.itemsize;
  require_aligned(reinterpret_cast<std::uintptr_t>(view.buf), count, dtype, name);
  return {static_cast<std::byte*>(view.buf), count, dtype, view.readonly != 0};
}

PyBuffer make_buffer(std::uintptr_t address, std::int64_t count, DType dtype, bool readonly, py::object owner,
                     std::optional<int> device, std::uintptr_t stream) {
  if (count < 0) throw InvalidUsage("Buffer: count is " + std::to_string(count));
  if (count > std::numeric_limits<std::int64_t>::max() / 16) throw InvalidUsage("Buffer: count is too large");
  if (address == 0 && count > 0) throw InvalidUsage("Buffer: address 0 with " + std::to_string(count) + " elements");
  require_aligned(address, count, dtype, "Buffer");
  if (device && *device < 0) throw InvalidUsage("Buffer: device is " + std::to_string(*device));
  if (!device && stream != 0) throw InvalidUsage("Buffer: a stream belongs to a device; pass device too");
  return {{reinterpret_cast<std::byte*>(address), count, dtype, readonly, device, stream}, std::move(owner)};
}

void release_finished() noexcept { graveyard().release(); }
void interpreter_ends() noexcept { graveyard().close(); }

}  // namespace comm_core::bindings
