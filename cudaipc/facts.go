package cudaipc

// GPUFacts are what is measured of a GPU once: by the mover's first process, before its device is opened.
type GPUFacts struct {
	Table   *CopyTable `json:",omitempty"` // nil: not measured
	Context int64      // bytes of the GPU's memory that an open device takes for itself, without its engines' memory; 0: not known
	Problem string     // why something is missing; empty: nothing is
}

// TableSource is where the copy table in use comes from.
type TableSource string

// The sources.
const (
	TableMeasured TableSource = "measured" // at the start of this agent's first mover of the GPU
	TableKnown    TableSource = "known"    // from those that the device was given
	TableDefault  TableSource = "default"  // nothing was measured on such a GPU
)

// CUDALimits are what kernels of the device's context are given, by the driver's own word, behind the lowering of them: bytes; -1: it
// does not say.
type CUDALimits struct {
	Stack    int64 // of a thread
	Printing int64
	Heap     int64
}

// CUDAInfo is the state of a CUDA device.
type CUDAInfo struct {
	Name    string
	GPU     UUID
	Driver  int    // the newest CUDA that the driver supports, 1000 * major + 10 * minor
	Batch   bool   // the driver has the batch call
	Paths   string // the copy table in one line
	Source  TableSource
	Facts   GPUFacts
	Limits  CUDALimits
	Free    int64 // bytes of the GPU's memory that are free, of Total
	Total   int64
	Imports int64 // allocations, pieces and events of peers that are open

	Arena      int64   // bytes
	Pinned     int64   // of these
	Refused    int64   // bytes that the driver does not pin; their copies go through the rings, and cost more
	PinError   string  // why; it may pass, if a call has not returned for long (PinPatience) and does in the end
	PinDone    bool    // nothing more will be pinned
	PinSeconds float64 // that the pinning has taken, or took in all
	RingBytes  uint64  // copied through the rings so far

	Singles, Batches, Rects, Kernels uint64 // calls so far
	KernelError                      string // why the kernel is not loaded though the table names it; empty: it is, or is not named

	Lost string // why every later call fails; empty: they do not
}
