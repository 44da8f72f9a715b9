package cudaipc

import (
	"fmt"
	"time"
)

// Names of the devices that a process of its own opens (MoverState.Device).
const (
	HostDevice = "host"
	CUDADevice = "cuda"
	CUDAProbe  = "cuda-probe" // the host's, if a GPU can be seen; else why not
)

// MoverState is what a mover is doing, for people and counters.
type MoverState struct {
	Name      string
	Device    string
	GPU       UUID
	Pid       int // 0: no process
	Since     time.Time
	Node      string // how it is bound to its NUMA node; empty: not asked for
	Peers     int
	Copies    int           // under way
	PingAge   time.Duration // since the last answer to a ping
	Starts    uint64
	Requests  uint64
	Lost      map[LossReason]uint64
	LastLoss  error
	NextStart time.Time // zero: at once
	Info      []byte    // what the device last said of itself, JSON; empty: nothing
	Failing   bool      // it worked once, and was lost several times in a row; no process runs
}

// LossReason is why a mover's process was lost.
type LossReason string

// The reasons.
const (
	LostStart  LossReason = "start"  // it did not start, or its device did not open
	LostCrash  LossReason = "crash"  // it ended by itself, was killed by others, or did what only a broken one does
	LostPing   LossReason = "ping"   // it did not answer pings
	LostCall   LossReason = "call"   // a request was not answered in time
	LostCopy   LossReason = "copy"   // a copy did not end in time
	LostDevice LossReason = "device" // its device said ErrLost
)

// LossReasons are all of them, in order.
var LossReasons = [...]LossReason{LostStart, LostCrash, LostPing, LostCall, LostCopy, LostDevice}

// LostError says that a mover was lost, and that it is reaped: what it was doing has ended.
type LostError struct {
	Mover  string
	Reason LossReason
	Cause  error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("mover %s was lost (%s): %v", e.Mover, e.Reason, e.Cause)
}

func (e *LostError) Unwrap() error { return e.Cause }
