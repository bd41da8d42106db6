# Compiles csrc/cuda/kernels.cu where nvcc is. Without nvcc, or where it fails, the build goes on without kernels:
# kernels.txt, which is installed in any case, says what there is or why there is nothing.
option(COMM_CORE_CUDA_KERNELS "Compile the CUDA kernels where nvcc is found" ON)

function(comm_core_compile_kernels)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/kernels.fatbin)
  set(notes ${CMAKE_CURRENT_BINARY_DIR}/kernels.txt)
  set(nvcc NOTFOUND)
  if(COMM_CORE_CUDA_KERNELS)
    find_program(nvcc_path nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin NO_CACHE)
    set(nvcc ${nvcc_path})
  endif()
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/kernels.cu)
  set(script ${CMAKE_CURRENT_SOURCE_DIR}/cmake/CompileKernels.cmake)
  add_custom_command(
    OUTPUT ${notes}
    BYPRODUCTS ${image}
    COMMAND ${CMAKE_COMMAND} -D NVCC=${nvcc} -D SOURCE=${source} -D IMAGE=${image} -D NOTES=${notes} -P ${script}
    DEPENDS ${source} ${script}
    COMMENT "Compiling CUDA kernels"
    VERBATIM)
  add_custom_target(comm_core_kernels ALL DEPENDS ${notes})
  install(FILES ${notes} DESTINATION comm_core)
  install(FILES ${image} DESTINATION comm_core OPTIONAL)
endfunction()
