/* Written by `flashdelta export`. */
#ifndef FLASHDELTA_PARAMETERS_H
#define FLASHDELTA_PARAMETERS_H

/* Parameters of kernels, by name. */
enum fd_parameter {
    @PARAMETERS@,
    FD_PARAMETERS
};

#define FD_KERNELS @KERNELS@
#define FD_ARCHITECTURES "@ARCHITECTURES@"

#endif
