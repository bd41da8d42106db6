# libcomm_core, and the modules that need no MPI. Paths are relative to the folder above.
# The engine and its types exist once; both extension modules stand on this library.
add_library(comm_core SHARED
  csrc/blockwise.cpp
  csrc/communicator.cpp
  csrc/copies.cpp
  csrc/halves.cpp
  csrc/layout.cpp
  csrc/levels.cpp
  csrc/operation.cpp
  csrc/process.cpp
  csrc/providers.cpp
  csrc/samples.cpp
  csrc/settings.cpp
  csrc/signature.cpp
  csrc/types.cpp
  csrc/validation.cpp
  csrc/work.cpp
  csrc/engine/engine.cpp
  csrc/engine/group.cpp
  csrc/engine/groups.cpp
  csrc/engine/pace.cpp
  csrc/engine/runtime.cpp
  csrc/engine/strand.cpp
  csrc/local/local_backend.cpp
  csrc/reduce/half.cpp
  csrc/reduce/kernels.cpp
  csrc/schedule/broadcast.cpp
  csrc/schedule/chain_reduce.cpp
  csrc/schedule/exchange.cpp
  csrc/schedule/levelled.cpp
  csrc/schedule/message.cpp
  csrc/schedule/planner.cpp
  csrc/schedule/ring.cpp
  csrc/schedule/ring_plan.cpp
  csrc/schedule/schedule.cpp
  csrc/schedule/tracks.cpp)
target_include_directories(comm_core PUBLIC include)
target_link_libraries(comm_core PUBLIC Threads::Threads PRIVATE comm_core_warnings)
set_source_files_properties(
  csrc/blockwise.cpp csrc/copies.cpp csrc/reduce/half.cpp csrc/reduce/kernels.cpp
  PROPERTIES COMPILE_OPTIONS "-O3")

pybind11_add_module(_C
  bindings/backend_py.cpp
  bindings/blockwise_py.cpp
  bindings/communicator_py.cpp
  bindings/copies_py.cpp
  bindings/errors_py.cpp
  bindings/halves_py.cpp
  bindings/memory.cpp
  bindings/module.cpp
  bindings/samples_py.cpp
  bindings/threads_py.cpp
  bindings/types_py.cpp
  bindings/work_py.cpp)
target_link_libraries(_C PRIVATE comm_core comm_core_warnings)
set(modules comm_core _C)

pybind11_add_module(_tcp
  csrc/tcp/connection.cpp
  csrc/tcp/driver.cpp
  csrc/tcp/group.cpp
  csrc/tcp/mesh.cpp
  csrc/tcp/module.cpp
  csrc/tcp/neighbour.cpp
  csrc/tcp/runtime.cpp
  csrc/tcp/socket.cpp
  csrc/tcp/world.cpp)
target_link_libraries(_tcp PRIVATE comm_core comm_core_warnings)
list(APPEND modules _tcp)

# NCCL and the CUDA driver are found at run time; nothing of theirs is needed to build this.
pybind11_add_module(_nccl
  csrc/cuda/cuda_driver.cpp
  csrc/cuda/shared_library.cpp
  csrc/nccl/enqueue.cpp
  csrc/nccl/failure.cpp
  csrc/nccl/group.cpp
  csrc/nccl/module.cpp
  csrc/nccl/nccl_api.cpp
  csrc/nccl/runtime.cpp)
target_link_libraries(_nccl PRIVATE comm_core comm_core_warnings ${CMAKE_DL_LIBS})
list(APPEND modules _nccl)

# Our kernels are found at run time too, in a file beside the modules; without nvcc there is none, and torch's are used.
pybind11_add_module(_cuda
  csrc/cuda/cuda_driver.cpp
  csrc/cuda/kernel_image.cpp
  csrc/cuda/module.cpp
  csrc/cuda/shared_library.cpp)
target_link_libraries(_cuda PRIVATE comm_core comm_core_warnings ${CMAKE_DL_LIBS})
list(APPEND modules _cuda)
include(cmake/CudaKernels.cmake)
comm_core_compile_kernels()
