// The end of a group in which some ranks have issued operations that others never will.
#pragma once

#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include "comm_core/work.hpp"

namespace [[gnu::visibility("default")]] comm_core {

/// Waits until nothing of any rank is under way any more, and then finishes the works of all who asked.
class Abandonment {
 public:
  explicit Abandonment(std::shared_ptr<Work> work) : works_{std::move(work)} {}
  Abandonment(const Abandonment&) = delete;
  Abandonment& operator=(const Abandonment&) = delete;
  virtual ~Abandonment() = default;

  /// Finishes `work` together with the first.
  void also(std::shared_ptr<Work> work) {
    if (over()) return work->finish(works_.front()->error());
    works_.push_back(std::move(work));
  }
  /// Goes on; `sent`: nothing that this rank has sent, or was receiving, is under way. True if something changed.
  virtual bool settle(bool sent) = 0;
  bool over() const { return works_.front()->done(); }
  /// Everything came to its end.
  virtual bool quiet() const = 0;

 protected:
  void finish(std::exception_ptr error = nullptr) {
    for (const auto& work : works_) work->finish(error);
  }

 private:
  std::vector<std::shared_ptr<Work>> works_;  // of all who asked
};

}  // namespace comm_core
