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
	Job   uint64 // the current job, unless Phase is Idle
	Phase Phase
	Age   time.Duration // since the phase began
	Queue int           // jobs waiting after it
}

// State returns a consistent snapshot.
func (w *Worker) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	return State{Save: w.mu.threads[Save].stateLocked(), Load: w.mu.threads[Load].stateLocked()}
}

func (th *thread) stateLocked() ThreadState {
	s := ThreadState{Phase: th.phase, Age: time.Since(th.since), Queue: len(th.queue)}
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

// Times are the parts of a job's time from Submit to its completion, which together they are.
type Times struct {
	Step   time.Duration // waiting for the engine's step and event
	Queue  time.Duration // all other time until the device was given the first copy
	Copy   time.Duration // from then on until the last byte had arrived
	Sums   time.Duration // until the sums, and those of samples, were there too
	Report time.Duration // until Config.Complete was called, the pool's commit or release included

	// Copied is false for a job of which nothing was copied: Step and Queue are all of its time.
	Copied bool
}

// clock has the times at which a job went from one part to the next; zero: not yet.
type clock struct {
	submitted              time.Time
	step                   time.Duration
	begun, arrived, summed time.Time
}

// begin notes that the device is given a copy.
func (c *clock) begin() {
	if c.begun.IsZero() {
		c.begun = time.Now()
	}
}

// end notes that a copy has ended, and that its sums took longer than its bytes by sums.
func (c *clock) end(sums time.Duration) {
	c.summed = time.Now()
	arrived := c.summed.Add(-min(max(sums, 0), c.summed.Sub(c.begun)))
	if arrived.After(c.arrived) {
		c.arrived = arrived
	}
}

// checked notes that a sample has ended.
func (c *clock) checked() { c.summed = time.Now() }

// times returns the parts of a job that is completed now.
func (c *clock) times() Times {
	now := time.Now()
	if c.arrived.IsZero() {
		return Times{Step: c.step, Queue: now.Sub(c.submitted) - c.step}
	}
	return Times{
		Step: c.step, Queue: c.begun.Sub(c.submitted) - c.step, Copy: c.arrived.Sub(c.begun),
		Sums: c.summed.Sub(c.arrived), Report: now.Sub(c.summed), Copied: true,
	}
}
