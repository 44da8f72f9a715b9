package mockengine

// Agent is the interface to the cache agent: the real one is a Link, tests have one in memory. All
// methods are called from the engine's goroutine and never wait longer than the engine's look-up
// time-out.
type Agent interface {
	// Ask looks a prompt up and reserves what is found.
	Ask(*Question) Answer
	// Submit sends a job to all ranks; false: nothing was sent, because there is no agent or a
	// queue is full.
	Submit(*Job) bool
	// Cancel asks for the end of a job. Its Event follows as for any other.
	Cancel(job uint64)
	// Release releases a lease.
	Release(Lease)
	// Events returns the finished jobs. Each submitted job has one event, when no rank's memory is
	// touched for it any more.
	Events() <-chan Event
}

// Question is a look-up: the hashes of a prompt's blocks from the first on.
type Question struct {
	Hashes []Hash
	Tokens int // length of the prompt
	Own    int // tokens the engine has itself
}

// Answer is what the agent has, in tokens from the first of the prompt on; 0 is nothing.
type Answer struct {
	Tokens  int
	Lease   Lease
	Failed  bool // not answered: no agent, or too late
	Pending bool // lower tiers are still being asked: Tokens is the answer so far, Lease pins it
}

// Lease names what a look-up pinned; the zero Lease is none. Numbers start again with each boot of
// the agent.
type Lease struct {
	Attachment uint32 // number of the link's attachment
	Number     uint64
}

// Kind of a job.
type Kind uint8

// The kinds of jobs.
const (
	SaveJob Kind = iota
	LoadJob
)

// Job is a save or a load of blocks, the same on every rank.
type Job struct {
	ID       uint64
	Kind     Kind
	Step     uint64 // save: computed the blocks; load: in flight
	Event    uint32 // recorded after that step
	Revoke   uint32 // save: its revocation word
	Lease    Lease  // load
	Sections []Section
}

// Section is a run of chained blocks of one group.
type Section struct {
	Group  uint8
	Parent []byte // hash before the first; empty at the start of a prompt
	Hashes []byte // joined
	Blocks []BlockID
}

// Event is a job that has ended on all ranks. Status has the protocol's status of each block of all
// sections, from the rank with the worst one; nil means that the agent was lost and nothing is
// known.
type Event struct {
	Job    uint64
	Status []uint8
	Moved  int  // blocks copied, over all ranks
	Reset  bool // no job: a new weights epoch was started
}
