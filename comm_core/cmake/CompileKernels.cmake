# cmake -D NVCC= -D SOURCE= -D IMAGE= -D NOTES= -D OPTIONS= -P CompileKernels.cmake: a fat binary, and a line about it. OPTIONS
# say for which cards. PTX serves newer ones; it is left as text, which tests read.
file(REMOVE ${IMAGE})
if(NOT NVCC)
  file(WRITE ${NOTES} "not compiled: no nvcc was found when comm_core was built\n")
  return()
endif()
execute_process(
  COMMAND ${NVCC} -fatbin --no-compress -O3 -std=c++17 ${OPTIONS} ${SOURCE} -o ${IMAGE}
  RESULT_VARIABLE status
  OUTPUT_VARIABLE said
  ERROR_VARIABLE said)
if(status EQUAL 0)
  execute_process(COMMAND ${NVCC} --version OUTPUT_VARIABLE version)
  string(REGEX MATCH "V[0-9.]+" version "${version}")
  file(WRITE ${NOTES} "compiled with ${NVCC} ${version}\n")
else()
  file(REMOVE ${IMAGE})
  string(REGEX REPLACE "\n.*" "" said "${said}")
  file(WRITE ${NOTES} "not compiled: ${NVCC} failed (${status}): ${said}\n")
  message(WARNING "CUDA kernels were not compiled: ${said}")
endif()
