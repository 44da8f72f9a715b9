package node

import (
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/kvagent/kvagent/cudaipc"
)

// GPUEnv returns what a process needs in its environment to see a GPU. The driver shows one MIG
// instance, the named or else the first one; a UUID that is none of the kernel's GPUs is an
// instance's. Whole GPUs need nothing: the operator decides which are visible.
func GPUEnv(gpu cudaipc.UUID) []string { return gpuEnv("/", gpu) }

// gpuEnv implements GPUEnv. Tests pass another root than /.
func gpuEnv(root string, gpu cudaipc.UUID) []string {
	texts := gpuTexts(root)
	for _, text := range texts {
		// The kernel does not know the UUID of a GPU that was never opened.
		if !strings.Contains(text, "gpu-") || isOf(text, gpu) {
			return nil
		}
	}
	if len(texts) == 0 {
		return nil
	}
	return []string{"CUDA_VISIBLE_DEVICES=MIG-" + strings.TrimPrefix(gpu.String(), "GPU-")}
}

// gpuTexts returns the kernel driver's text about each GPU, in lower case, by file name.
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

// NUMANode returns the NUMA node of a GPU from the kernel's files, without a driver call; -1:
// unknown (a MIG instance, one node only, no such GPU).
func NUMANode(gpu cudaipc.UUID) int { return numaNode("/", gpu) }

// numaNode implements NUMANode. Tests pass another root than /.
func numaNode(root string, gpu cudaipc.UUID) int {
	for file, text := range gpuTexts(root) {
		if isOf(text, gpu) {
			return nodeOf(root, file)
		}
	}
	return -1
}

// nodeOf returns the NUMA node of the GPU of a text, or -1.
func nodeOf(root, file string) int {
	bus := strings.ToLower(filepath.Base(filepath.Dir(file)))
	text, _ := os.ReadFile(filepath.Join(root, "sys/bus/pci/devices", bus, "numa_node"))
	if node, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil {
		return node
	}
	return -1
}

// CountGPUs returns how many GPUs the kernel driver lists, without a driver call.
func CountGPUs() int { return len(gpuTexts("/")) }

// NUMANodes returns the NUMA nodes of the GPUs that the kernel driver lists, without a driver call:
// memory that GPUs copy from belongs there. If there are none, why has the reason.
func NUMANodes() (nodes []int, why string) { return numaNodes("/") }

// numaNodes implements NUMANodes. Tests pass another root than /.
func numaNodes(root string) (nodes []int, why string) {
	all, _ := filepath.Glob(filepath.Join(root, "sys/devices/system/node/node[0-9]*")) // the pattern is well-formed
	gpus := gpuTexts(root)
	for file := range gpus {
		if node := nodeOf(root, file); node >= 0 {
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	switch {
	case len(all) < 2:
		return nil, "this machine has one NUMA node, or none"
	case len(gpus) == 0:
		return nil, "the kernel's driver lists no GPU"
	case len(nodes) == 0:
		return nil, "the kernel does not tell the GPUs' NUMA nodes"
	}
	return slices.Compact(nodes), ""
}
