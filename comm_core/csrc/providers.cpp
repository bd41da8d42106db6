#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "comm_core/backend.hpp"
#include "comm_core/errors.hpp"

namespace comm_core {
namespace {

struct Providers {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Provider>> by_name;  // none is ever removed
};

Providers& providers() {
  // Never destroyed: engine threads may outlive static destruction.
  static auto* instance = new Providers;
  return *instance;
}

/// Those there are now; they are called without the lock, since a call may take long.
std::vector<Provider*> all_providers() {
  const std::lock_guard lock(providers().mutex);
  std::vector<Provider*> all;
  for (const auto& [name, provider] : providers().by_name) all.push_back(provider.get());
  return all;
}

}  // namespace

void register_provider(const std::string& name, std::unique_ptr<Provider> provider) {
  const std::lock_guard lock(providers().mutex);
  providers().by_name[name] = std::move(provider);
}

Provider* find_provider(const std::string& name) noexcept {
  const std::lock_guard lock(providers().mutex);
  const auto found = providers().by_name.find(name);
  return found == providers().by_name.end() ? nullptr : found->second.get();
}

void finalize_providers() {
  for (auto* provider : all_providers()) provider->finalize();
}

void abort_process(int code) noexcept {
  for (auto* provider : all_providers()) provider->abort(code);
  ::_exit(code);
}

Birth Backend::part(std::vector<int>, std::string, std::shared_ptr<Work>) {
  throw Unsupported("part: " + name() + " makes groups with all ranks, by split()");
}

}  // namespace comm_core
