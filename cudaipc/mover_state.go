package cudaipc

import "fmt"

// Names of the devices that a process of its own opens (MoverState.Device).
const (
	HostDevice = "host"
	CUDADevice = "cuda"
	CUDAProbe  = "cuda-probe" // the host's, if a GPU is visible; else an error
)

// MoverState is the state of a mover, a process with engines' memory open, for people and metrics.
type MoverState struct {
	Name        string                `json:"name" label:"mover"`
	Device      string                `json:"device"`
	PID         int                   `json:"pid"` // 0: no process
	Running     bool                  `json:"running" metric:"mover_running"`
	UpSeconds   float64               `json:"up_seconds"`
	Node        string                `json:"numa_node"` // how it is bound to it; empty: not asked for
	Peers       int                   `json:"peers"`     // workers whose memory is open
	Copies      int                   `json:"copies"`    // in flight
	PingAgeMS   int64                 `json:"ping_age_ms"`
	Starts      uint64                `json:"starts" metric:"mover_starts_total"`
	Requests    uint64                `json:"requests"`
	Lost        map[LossReason]uint64 `json:"lost" metric:"mover_lost_total" label:"reason"` // has each reason
	LastLoss    string                `json:"last_loss"`
	NextStartMS int64                 `json:"next_start_ms"` // until it may be started again
	// Failing: it worked once, and was lost several times in a row; no process runs.
	Failing bool `json:"failing" metric:"mover_failing"`

	GPU *CUDAInfo `json:"gpu,omitempty"` // as its device reported it last; all zero before that
}

// LossReason is why a mover's process was lost.
type LossReason string

// The reasons.
const (
	LostStart  LossReason = "start"  // it did not start, or its device did not open
	LostCrash  LossReason = "crash"  // it ended by itself, was killed by others, or violated the protocol
	LostPing   LossReason = "ping"   // it did not answer pings
	LostCall   LossReason = "call"   // a request was not answered in time
	LostCopy   LossReason = "copy"   // a copy did not end in time
	LostDevice LossReason = "device" // its device returned ErrLost
)

// LossReasons are all of them, in order.
var LossReasons = [...]LossReason{LostStart, LostCrash, LostPing, LostCall, LostCopy, LostDevice}

// LostError reports that a mover was lost and reaped: its requests and copies have ended.
type LostError struct {
	Mover  string
	Reason LossReason
	Cause  error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("mover %s was lost (%s): %v", e.Mover, e.Reason, e.Cause)
}

func (e *LostError) Unwrap() error { return e.Cause }

// CUDAInfo is the state of a CUDA device.
type CUDAInfo struct {
	Name    string
	GPU     UUID
	Driver  int   // the newest CUDA that the driver supports, 1000 * major + 10 * minor
	Batch   bool  // the driver has the batch call
	Free    int64 `metric:"gpu_memory_free_bytes"` // of the GPU's memory, of Total
	Total   int64 `metric:"gpu_memory_bytes"`
	Imports int64 `metric:"gpu_imports"` // allocations, pieces and events of peers that are open

	Arena  int64 // bytes
	Pinned int64 `metric:"gpu_pool_pinned_bytes"` // of these
	// Refused are bytes that the driver does not pin; their copies go through the slower rings.
	Refused    int64   `metric:"gpu_pool_refused_bytes"`
	PinError   string  // why; it may pass, if a call has not returned for long (MaxPinCall) and does in the end
	PinDone    bool    // nothing more will be pinned
	PinSeconds float64 // that the pinning has taken, or took in all
	RingBytes  uint64  `metric:"gpu_ring_bytes_total"` // copied through the rings so far

	Lost string // why every later call fails; empty: they do not
}
