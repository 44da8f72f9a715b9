package transfer

import "time"

// Phase is the current activity of a thread.
type Phase string

// The phases, in the order of a job.
const (
	Idle         Phase = "idle"
	Checking     Phase = "checking"
	WaitingEvent Phase = "waiting_event" // for the engine's step and event
	WaitingPace  Phase = "waiting_pace"  // for the budget of copies beside decode steps
	WaitingLane  Phase = "waiting_lane"  // for other workers' copies
	Reserving    Phase = "reserving"     // asking the pool for slots
	Copying      Phase = "copying"
	Verifying    Phase = "verifying"  // waiting for sums of the engine's memory
	Committing   Phase = "committing" // giving the slots back to the pool
	Completing   Phase = "completing" // in Config.Complete
)

// State is the state of a worker's two threads.
type State struct{ Save, Load ThreadState }

// ThreadState is the state of one thread.
type ThreadState struct {
	Job    uint64 // the current job, unless Phase is Idle
	Phase  Phase
	Age    time.Duration // since the phase began
	Queue  int           // jobs waiting after it
	Counts Counts
}

// Counts since Start.
type Counts struct {
	Jobs    uint64
	Bytes   uint64
	Refused uint64          // jobs refused because the queue was full
	Blocks  [Off + 1]uint64 // blocks by status
}

// State returns a consistent snapshot.
func (w *Worker) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return State{Save: w.mu.threads[Save].stateLocked(), Load: w.mu.threads[Load].stateLocked()}
}

func (th *thread) stateLocked() ThreadState {
	s := ThreadState{Phase: th.phase, Age: time.Since(th.since), Queue: len(th.queue), Counts: th.counts}
	if th.job != nil {
		s.Job = th.job.job.ID
	}
	return s
}

func (th *thread) enter(p Phase) {
	th.w.mu.Lock()
	defer th.w.mu.Unlock()
	th.enterLocked(p)
}

func (th *thread) enterLocked(p Phase) { th.phase, th.since = p, time.Now() }

func (c *Counts) add(t *task) {
	c.Jobs++
	c.Bytes += uint64(t.bytes)
	for _, s := range t.status {
		c.Blocks[min(s, Off)]++
	}
}
