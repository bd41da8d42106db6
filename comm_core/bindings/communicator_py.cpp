#include <pybind11/stl.h>

#include <limits>
#include <string>

#include "comm_core/communicator.hpp"
#include "comm_core/errors.hpp"
#include "memory.hpp"
#include "register.hpp"
#include "waiting.hpp"

namespace comm_core::bindings {
namespace {

using CommunicatorClass = py::class_<Communicator, std::shared_ptr<Communicator>>;
using Label = std::string;

/// Calls `start`; without the GIL where a device takes part, because its library may then wait for other ranks.
template <class Start>
WorkPtr issue(const Communicator& c, const Start& start) {
  std::optional<py::gil_scoped_release> release;
  if (c.device()) release.emplace();
  return start();
}

WideBuffers wide(Arguments& a, const py::object& send, const py::object& recv) {
  WideBuffers buffers;
  if (!send.is_none()) buffers.send = a.view(send, "wide_send");
  if (!recv.is_none()) buffers.recv = a.view(recv, "wide_recv");
  return buffers;
}

Persistent reduce_scatter_init(Communicator& c, const py::object& send, const py::object& recv, ReduceOp op,
                               const Counts& counts, const py::object& wide_send, const py::object& wide_recv,
                               Label label) {
  Arguments a;
  const auto from = a.view(send, "send"), to = a.view(recv, "recv");
  return c.reduce_scatter_init(from, to, op, counts, wide(a, wide_send, wide_recv), std::move(label), a.keep_alive());
}

Persistent all_gather_init(Communicator& c, const py::object& send, const py::object& recv, const Counts& counts,
                           const py::object& wide_send, const py::object& wide_recv, Label label) {
  Arguments a;
  const auto from = a.view(send, "send"), to = a.view(recv, "recv");
  return c.all_gather_init(from, to, counts, wide(a, wide_send, wide_recv), std::move(label), a.keep_alive());
}

Persistent all_reduce_init(Communicator& c, const py::object& send, const py::object& recv, ReduceOp op, Label label) {
  Arguments a;
  const auto from = a.view(send, "send"), to = a.view(recv, "recv");
  return c.all_reduce_init(from, to, op, std::move(label), a.keep_alive());
}

WorkPtr start(const Persistent& p) {
  return issue(p.communicator(), [&] { return p.start(); });
}

/// The form of an operation that is issued at once. It may be over, or refused, when this returns.
template <auto init, class... Args>
WorkPtr at_once(Communicator& c, Args... args) {
  struct Releasing {
    Releasing() = default;
    Releasing(const Releasing&) = delete;
    Releasing& operator=(const Releasing&) = delete;
    ~Releasing() { release_finished(); }
  } const at_the_end;
  auto operation = init(c, std::forward<Args>(args)...);
  return issue(c, [&] { return std::move(operation).start(); });
}

WorkPtr broadcast(Communicator& c, const py::object& buffer, int root, Label label) {
  Arguments a;
  const auto view = a.view(buffer, "buffer");
  return issue(c, [&] { return c.broadcast(view, root, std::move(label), a.keep_alive()); });
}

WorkPtr reduce(Communicator& c, const py::object& send, const py::object& recv, ReduceOp op, int root, Label label) {
  Arguments a;
  const auto from = a.view(send, "send");
  std::optional<Buffer> into;
  if (!recv.is_none()) into = a.view(recv, "recv");
  return issue(c, [&] { return c.reduce(from, into, op, root, std::move(label), a.keep_alive()); });
}

WorkPtr all_to_all(Communicator& c, const py::object& send, const py::object& recv, const Counts& send_counts,
                   const Counts& recv_counts, Label label) {
  Arguments a;
  const auto from = a.view(send, "send"), to = a.view(recv, "recv");
  return issue(c, [&] { return c.all_to_all(from, to, send_counts, recv_counts, std::move(label), a.keep_alive()); });
}

WorkPtr send(Communicator& c, const py::object& buffer, int peer, int tag, Label label) {
  Arguments a;
  const auto view = a.view(buffer, "buffer");
  return issue(c, [&] { return c.send(view, peer, tag, std::move(label), a.keep_alive()); });
}

WorkPtr receive(Communicator& c, const py::object& buffer, int peer, int tag, Label label) {
  Arguments a;
  const auto view = a.view(buffer, "buffer");
  return issue(c, [&] { return c.receive(view, peer, tag, std::move(label), a.keep_alive()); });
}

WorkPtr barrier(Communicator& c, Label label) {
  return issue(c, [&] { return c.barrier(std::move(label)); });
}

/// Defines `name`_async, and `name` as the same call followed by wait().
template <class... Args, class... Extra>
void def_operation(CommunicatorClass& type, const std::string& name, WorkPtr (*start)(Communicator&, Args...),
                   const Extra&... extra) {
  type.def((name + "_async").c_str(), start, extra...);
  type.def(
      name.c_str(), [start](Communicator& c, Args... args) { wait_for(*start(c, std::forward<Args>(args)...), {}); },
      extra...);
}

/// Defines `name`_init, and the two forms of def_operation.
template <auto init, class... Args, class... Extra>
void def_persistent(CommunicatorClass& type, const std::string& name, Persistent (*)(Communicator&, Args...),
                    const Extra&... extra) {
  type.def((name + "_init").c_str(), init, extra...);
  def_operation(type, name, at_once<init, Args...>, extra...);
}

std::optional<std::pair<int, py::bytes>> receive_post(Communicator& c, std::optional<double> timeout) {
  const std::chrono::duration<double> patience{timeout.value_or(std::numeric_limits<double>::infinity())};
  const auto letter = unlocked([&] { return c.receive_post(patience, raise_signals); });
  if (!letter) return std::nullopt;
  return std::pair{letter->source, py::bytes(letter->payload)};
}

}  // namespace

void register_communicator(py::module_& m) {
  const auto op = py::arg("op") = ReduceOp::kSum;
  const auto label = py::arg("label") = "";
  const auto counts = py::arg("counts") = py::none();
  const auto wide_send = py::arg("wide_send") = py::none(), wide_recv = py::arg("wide_recv") = py::none();
  py::class_<Persistent>(m, "Persistent", "An operation whose arguments were checked, to be issued again and again.")
      .def("start", &start);
  CommunicatorClass type(m, "Communicator",
                         "A group of ranks. Every operation has a form that returns a Work at once.");
  type.def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("size", &Communicator::size)
      .def_property_readonly("shard_rank", &Communicator::shard_rank)
      .def_property_readonly("shard_size", &Communicator::shard_size)
      .def_property_readonly("backend", &Communicator::backend)
      .def_property_readonly("name", &Communicator::name)
      .def_property_readonly("device", &Communicator::device)
      .def("__repr__", [](const Communicator& c) {
        return "<comm_core.Communicator " + c.name() + ", rank " + std::to_string(c.rank()) + " of " +
               std::to_string(c.size()) + ">";
      });
  def_persistent<reduce_scatter_init>(type, "reduce_scatter", reduce_scatter_init, py::arg("send"), py::arg("recv"), op,
                                      py::kw_only(), counts, wide_send, wide_recv, label);
  def_persistent<all_gather_init>(type, "all_gather", all_gather_init, py::arg("send"), py::arg("recv"), py::kw_only(),
                                  counts, wide_send, wide_recv, label);
  def_persistent<all_reduce_init>(type, "all_reduce", all_reduce_init, py::arg("send"), py::arg("recv"), op,
                                  py::kw_only(), label);
  def_operation(type, "broadcast", broadcast, py::arg("buffer"), py::arg("root") = 0, py::kw_only(), label);
  def_operation(type, "reduce", reduce, py::arg("send"), py::arg("recv"), op, py::arg("root") = 0, py::kw_only(),
                label);
  def_operation(type, "all_to_all", all_to_all, py::arg("send"), py::arg("recv"), py::kw_only(),
                py::arg("send_counts") = py::none(), py::arg("recv_counts") = py::none(), label);
  def_operation(type, "send", send, py::arg("buffer"), py::arg("peer"), py::arg("tag") = 0, py::kw_only(), label);
  def_operation(type, "recv", receive, py::arg("buffer"), py::arg("peer"), py::arg("tag") = 0, py::kw_only(), label);
  def_operation(type, "barrier", barrier, py::kw_only(), label);
  type.def(
          "all_gather_counts",
          [](Communicator& c, std::int64_t send_count) {
            return unlocked([&] { return c.all_gather_counts(send_count, raise_signals); });
          },
          py::arg("send_count"))
      .def(
          "split",
          [](Communicator& c, std::optional<int> color, int key) {
            return unlocked([&] { return c.split(color, key, raise_signals); });
          },
          py::arg("color"), py::arg("key") = 0)
      .def(
          "part",
          [](Communicator& c, std::vector<int> ranks, std::string name) {
            return unlocked([&] { return c.part(std::move(ranks), std::move(name), raise_signals); });
          },
          py::arg("ranks"), py::arg("name"))
      .def(
          "two_level",
          [](Communicator& c, std::vector<std::vector<int>> groups) {
            return unlocked([&] { return c.with({Levels::Kind::kTwoLevel, std::move(groups)}, raise_signals); });
          },
          py::arg("groups"))
      .def(
          "hybrid",
          [](Communicator& c, std::vector<std::vector<int>> groups) {
            return unlocked([&] { return c.with({Levels::Kind::kHybrid, std::move(groups)}, raise_signals); });
          },
          py::arg("groups"))
      .def(
          "post", [](Communicator& c, int peer, const py::bytes& payload) { return c.post(peer, payload); },
          py::arg("peer"), py::arg("payload"))
      .def("receive_post", &receive_post, py::arg("timeout"))
      .def("pending", [](Communicator& c) { return unlocked([&] { return c.pending(); }); })
      .def("abandon", [](Communicator& c) { unlocked([&] { c.abandon(raise_signals); }); })
      .def("close", [](Communicator& c) { unlocked([&] { c.close(raise_signals); }); });
}

}  // namespace comm_core::bindings
