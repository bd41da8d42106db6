#include <unistd.h>

#include <utility>

#include "comm_core/backend.hpp"

namespace comm_core {
namespace {

std::map<std::string, std::unique_ptr<Provider>>& providers() {
  // Never destroyed: engine threads may outlive static destruction.
  static auto* instance = new std::map<std::string, std::unique_ptr<Provider>>;
  return *instance;
}

}  // namespace

void register_provider(const std::string& name, std::unique_ptr<Provider> provider) {
  providers()[name] = std::move(provider);
}

Provider* find_provider(const std::string& name) noexcept {
  const auto found = providers().find(name);
  return found == providers().end() ? nullptr : found->second.get();
}

void finalize_providers() {
  for (auto& [name, provider] : providers()) provider->finalize();
}

void abort_process(int code) noexcept {
  for (auto& [name, provider] : providers()) provider->abort(code);
  ::_exit(code);
}

}  // namespace comm_core
