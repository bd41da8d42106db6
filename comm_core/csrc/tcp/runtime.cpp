#include "runtime.hpp"

#include <utility>

#include "comm_core/errors.hpp"

namespace comm_core {

std::unique_ptr<Driver> TcpRuntime::make_driver() {
  auto driver = std::make_unique<TcpDriver>();
  driver_ = driver.get();
  return driver;
}

Birth TcpRuntime::connect(std::optional<std::intptr_t>, std::shared_ptr<Work>) {
  throw Unsupported("tcp: the ranks of a job have to find each other first: comm_core.tcp()");
}

Birth TcpRuntime::join(Mesh mesh, std::shared_ptr<Work> work) {
  start();
  Birth birth{work};
  const auto shared = std::make_shared<Mesh>(std::move(mesh));  // tasks are copied
  post(
      [this, shared, work, slot = birth.backend] {
        *slot = backend_of(driver_->connect(std::move(*shared)), "tcp");
        work->finish();
      },
      work);
  return birth;
}

}  // namespace comm_core
