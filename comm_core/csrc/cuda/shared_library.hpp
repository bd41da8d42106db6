// A library that is found at run time and never linked.
#pragma once

#include <string>

namespace comm_core {

/// Stays loaded as long as the process: its threads may outlive whoever loaded it.
class SharedLibrary {
 public:
  /// Throws Unsupported with the loader's reason.
  explicit SharedLibrary(std::string path);

  const std::string& path() const noexcept { return path_; }
  /// Points `function` to the symbol `name`. Throws Unsupported when there is none.
  template <class F>
  void bind(F*& function, const char* name) const {
    function = reinterpret_cast<F*>(symbol(name));
  }

 private:
  void* symbol(const char* name) const;

  std::string path_;
  void* handle_;
};

}  // namespace comm_core
