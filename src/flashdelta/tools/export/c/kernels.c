/* Written by `flashdelta export`. */
#include "runtime.h"

@DECLARATIONS@

@ORDERS@

const fd_kernel fd_kernels[] = {
    @TABLE@,
};

const unsigned fd_kernel_count = FD_KERNELS;
