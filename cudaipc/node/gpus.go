package node

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/kvagent/kvagent/cudaipc"
)

// GPUEnv returns what a process must have in its environment to see a GPU. The driver shows one MIG
// instance, the one that is named, else the first: a UUID that is none of the kernel's GPUs is an
// instance's. Of whole GPUs each is seen that the operator lets be seen.
func GPUEnv(gpu cudaipc.UUID) []string { return gpuEnv("/", gpu) }

// gpuEnv is GPUEnv below root, which is / but for tests.
func gpuEnv(root string, gpu cudaipc.UUID) []string {
	texts := gpuTexts(root)
	for _, text := range texts {
		// the kernel does not know a GPU's UUID that nobody has opened
		if !strings.Contains(text, "gpu-") || isOf(text, gpu) {
			return nil
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return []string{"CUDA_VISIBLE_DEVICES=MIG-" + strings.TrimPrefix(gpu.String(), "GPU-")}
}

// gpuTexts returns what the kernel's driver says of each GPU, in lower case, by the file that it is
// in.
func gpuTexts(root string) map[string]string {
	files, err := filepath.Glob(filepath.Join(root, "proc/driver/nvidia/gpus/*/information"))
	if err != nil {
		return nil
	}
	texts := map[string]string{}
	for _, file := range files {
		text, _ := os.ReadFile(file) // nothing is known of one that cannot be read
		texts[file] = strings.ToLower(string(text))
	}
	return texts
}

func isOf(text string, gpu cudaipc.UUID) bool {
	return strings.Contains(text, strings.ToLower(gpu.String()))
}

// NUMANode returns the NUMA node of a GPU as the kernel tells it, without a driver call; -1: not
// known (a MIG instance, one node only, no such GPU here).
func NUMANode(gpu cudaipc.UUID) int { return numaNode("/", gpu) }

// numaNode is NUMANode below root, which is / but for tests.
func numaNode(root string, gpu cudaipc.UUID) int {
	for file, text := range gpuTexts(root) {
		if !isOf(text, gpu) {
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

// CountGPUs returns how many GPUs the kernel's driver says there are, without a call of it.
func CountGPUs() int {
	files, err := filepath.Glob("/proc/driver/nvidia/gpus/*/information")
	if err != nil {
		return 0
	}
	return len(files)
}

// NUMANodes returns the NUMA nodes that this machine's GPUs are on, as the kernel tells them
// without a driver call: where memory is to lie that GPUs copy from. Where there are none, why says
// so.
func NUMANodes() (nodes []int, why string) { return numaNodes("/") }

// What the kernel says of an NVIDIA GPU on the bus: the maker, and the first two bytes of the class
// (display controllers with and without a screen).
const nvidiaVendor = "0x10de"

var gpuClasses = []string{"0x0300", "0x0302"}

// numaNodes is GPUNodes below root, which is / but for tests.
func numaNodes(root string) (nodes []int, why string) {
	if all, err := filepath.Glob(filepath.Join(root, "sys/devices/system/node/node[0-9]*")); err != nil ||
		len(all) < 2 {
		return nil, "this machine has one NUMA node, or none"
	}
	devices, err := filepath.Glob(filepath.Join(root, "sys/bus/pci/devices/*"))
	if err != nil {
		return nil, err.Error()
	}
	gpus := 0
	for _, device := range devices {
		if !isGPU(device) {
			continue
		}
		gpus++
		if n, err := strconv.Atoi(readWord(device, "numa_node")); err == nil && n >= 0 {
			nodes = append(nodes, n)
		}
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	switch {
	case gpus == 0:
		return nil, "the kernel shows no GPU on the PCI bus"
	case len(nodes) == 0:
		return nil, "the kernel does not tell the GPUs' NUMA nodes"
	}
	return nodes, ""
}

func isGPU(device string) bool {
	class := readWord(device, "class")
	return readWord(device, "vendor") == nvidiaVendor && len(class) >= 6 && slices.Contains(gpuClasses, class[:6])
}

// readWord returns what a file of sysfs says, empty if it cannot be read.
func readWord(folder, name string) string {
	text, err := os.ReadFile(filepath.Join(folder, name))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
