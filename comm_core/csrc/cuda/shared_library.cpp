#include "shared_library.hpp"

#include <dlfcn.h>

#include <utility>

#include "comm_core/errors.hpp"

namespace comm_core {

SharedLibrary::SharedLibrary(std::string path)
    : path_(std::move(path)), handle_(dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (handle_ == nullptr) throw Unsupported(path_ + " does not load: " + dlerror());
}

void* SharedLibrary::symbol(const char* name) const {
  void* const found = dlsym(handle_, name);
  if (found == nullptr) throw Unsupported(path_ + " has no " + name + ": it is too old, or another library");
  return found;
}

}  // namespace comm_core
