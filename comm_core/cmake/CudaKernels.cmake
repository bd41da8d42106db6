# Compiles csrc/cuda/kernels.cu where nvcc is. Without nvcc, or where it fails, the build goes on without kernels:
# kernels.txt, which is installed in any case, says what there is or why there is nothing. TORCH_CUDA_ARCH_LIST chooses for
# which cards, in torch's words; by default sm_80 and sm_90, and PTX of the oldest for newer ones.
option(COMM_CORE_CUDA_KERNELS "Compile the CUDA kernels where nvcc is found" ON)

function(comm_core_compile_kernels)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/kernels.fatbin)
  set(notes ${CMAKE_CURRENT_BINARY_DIR}/kernels.txt)
  set(nvcc NOTFOUND)
  if(COMM_CORE_CUDA_KERNELS)
    find_program(nvcc_path nvcc HINTS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin NO_CACHE)
    set(nvcc ${nvcc_path})
  endif()
  set(wished "$ENV{TORCH_CUDA_ARCH_LIST}")
  if(NOT wished)
    set(wished "8.0+PTX;9.0")
  endif()
  comm_core_gencode("${wished}" targets)
  set(warnings)
  if(COMM_CORE_WERROR)
    set(warnings -Werror all-warnings)
  endif()
  set(source ${CMAKE_CURRENT_SOURCE_DIR}/csrc/cuda/kernels.cu)
  set(script ${CMAKE_CURRENT_SOURCE_DIR}/cmake/CompileKernels.cmake)
  add_custom_command(
    OUTPUT ${notes}
    BYPRODUCTS ${image}
    COMMAND ${CMAKE_COMMAND} -D NVCC=${nvcc} -D SOURCE=${source} -D IMAGE=${image} -D NOTES=${notes}
            "-DOPTIONS=${targets};${warnings}" -P ${script}
    DEPENDS ${source} ${script}
    COMMENT "Compiling CUDA kernels"
    VERBATIM)
  add_custom_target(comm_core_kernels ALL DEPENDS ${notes})
  install(FILES ${notes} DESTINATION comm_core)
  install(FILES ${image} DESTINATION comm_core OPTIONAL)
endfunction()

# comm_core_gencode(WISHED OUT): nvcc's options for a TORCH_CUDA_ARCH_LIST, such as "8.0 9.0+PTX" or "Ampere;Hopper".
function(comm_core_gencode wished out)
  string(REPLACE " " ";" wished "${wished}")
  set(Turing 7.5+PTX)
  set(Ampere+Tegra 8.7)
  set(Ampere 8.0 8.6+PTX)
  set(Ada 8.9+PTX)
  set(Hopper 9.0+PTX)
  set(Blackwell+Tegra 11.0)
  set(Blackwell 10.0 10.3 12.0 12.1+PTX)
  set(options)
  foreach(name IN LISTS wished)
    set(architectures ${name})
    if(name MATCHES "^(Turing|Ampere\\+Tegra|Ampere|Ada|Hopper|Blackwell\\+Tegra|Blackwell)$")
      set(architectures ${${name}})
    endif()
    foreach(architecture IN LISTS architectures)
      if(NOT architecture MATCHES "^([0-9]+)\\.([0-9][a-z]?)(\\+PTX)?$")
        message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST should hold versions such as 8.0 or 9.0+PTX, or Turing, Ampere, Ada, Hopper "
                            "or Blackwell, and holds '${architecture}'")
      endif()
      set(number ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
      list(APPEND options -gencode arch=compute_${number},code=sm_${number})
      if(CMAKE_MATCH_3)
        list(APPEND options -gencode arch=compute_${number},code=compute_${number})
      endif()
    endforeach()
  endforeach()
  set(${out} "${options}" PARENT_SCOPE)
endfunction()
