package cudaipc

import (
	"encoding/hex"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// ForGPU are the options of the mover of one GPU: named for it, and bound to its NUMA node if that is known.
func (o MoverOptions) ForGPU(gpu UUID) MoverOptions {
	o.Name, o.Device, o.GPU, o.Node = gpu.String(), CUDADevice, gpu, gpuNode("/", gpu)
	return o
}

// gpuNode is the NUMA node of a GPU as the kernel tells it, without a driver call; -1: not known (a MIG instance, one
// node only, no such GPU here). root is / but for tests.
func gpuNode(root string, gpu UUID) int {
	files, err := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*/information"))
	if err != nil {
		return -1
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil || !strings.Contains(strings.ToLower(string(text)), strings.ToLower(gpu.String())) {
			continue
		}
		bus := strings.ToLower(filepath.Base(filepath.Dir(file)))
		number, err := os.ReadFile(filepath.Join(root, "sys/bus/pci/devices", bus, "numa_node"))
		if err != nil {
			return -1
		}
		if node, err := strconv.Atoi(strings.TrimSpace(string(number))); err == nil && node >= 0 {
			return node
		}
	}
	return -1
}

// String is the UUID as NVIDIA's tools print that of a GPU.
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return "GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// CountGPUs is how many GPUs the kernel's driver says there are, without a call of it.
func CountGPUs() int {
	files, err := filepath.Glob("/proc/driver/nvidia/gpus/*/information")
	if err != nil {
		return 0
	}
	return len(files)
}
