/* The part of the CUDA driver API that kvagent and gorgonia.org/cu v0.9.6 use, as of CUDA 12.9.
 *
 * Written from the public reference of the driver API (https://docs.nvidia.com/cuda/cuda-driver-api/): what is here are
 * names, values, layouts and prototypes, which any program that talks to libcuda.so.1 shares. It is not NVIDIA's file and
 * holds none of its text. scripts/cuda-header-check holds every line of it against the real headers of CUDA 12.9 and 13;
 * for its sake each constant, member and prototype is written in one plain form (see there).
 *
 * For lack of need: no per-thread default stream (CUDA_API_PER_THREAD_DEFAULT_STREAM), no 32-bit platforms, no C++.
 */
#ifndef KVAGENT_CUDA_H
#define KVAGENT_CUDA_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h> /* as the real one: gorgonia.org/cu takes free() from here */

#define CUDA_VERSION 12090 /* the version whose names and layouts these are */

#include "cuda/abinames.h"
#include "cuda/result.h"
#include "cuda/types.h"

#include "cuda/device.h"
#include "cuda/context.h"
#include "cuda/memory.h"
#include "cuda/ipc.h"
#include "cuda/vmm.h"
#include "cuda/copy.h"
#include "cuda/batch.h"
#include "cuda/memset.h"
#include "cuda/stream.h"
#include "cuda/event.h"
#include "cuda/module.h"
#include "cuda/launch.h"
#include "cuda/link.h"
#include "cuda/graph.h"
#include "cuda/texture.h"

#endif
