package mockengine

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kvagent/kvagent/ipc"
)

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

	from int // the first one's number in the group of its request
}

// Event is a job that has ended on all ranks. Status has the protocol's status of each block of all
// sections, from the rank with the worst one; nil means that the agent was lost and nothing is
// known.
type Event struct {
	Job    uint64
	Status []uint8
	Moved  int // blocks copied, over all ranks
}

// Limits of a link.
const (
	linkEvents   = 4096                   // events that the engine has not taken; more wait in the sessions
	linkQueue    = 1024                   // messages of one session that are queued
	linkJobs     = linkQueue - 256        // jobs are refused from here on; the rest is for cancels and releases
	redialFirst  = 20 * time.Millisecond  // pause before the first try to connect again
	redialLast   = 500 * time.Millisecond // longest pause between tries
	attachWithin = 5 * time.Second        // to connect and register all ranks
)

// LinkConfig locates the agent.
type LinkConfig struct {
	Session    string // path of the session socket
	LookupName string // look-up socket to be opened for the engine; empty: the common one
}

// Link is the Agent over the real protocols: a session for the scheduler and one for each rank, and
// a look-up socket. It connects and reconnects by itself, and registers again with each boot of the
// agent; without an agent, look-ups are misses and jobs are refused. One goroutine calls its Agent
// methods.
type Link struct {
	cfg    Config
	where  LinkConfig
	ranks  *Workers
	events chan Event

	lookups *LookupClient // of the engine's goroutine; nil: nothing was asked
	blob    []byte        // hashes of a question, joined

	mu struct {
		sync.Mutex
		current     *attachment // nil: none
		attachments uint32
		lastErr     error
	}
	up     chan struct{} // closed at the first attachment
	upOnce sync.Once
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// NewLink starts to connect. cfg is validated.
func NewLink(cfg Config, where LinkConfig, w *Workers) *Link {
	ctx, cancel := context.WithCancel(context.Background())
	l := &Link{cfg: cfg, where: where, ranks: w, events: make(chan Event, linkEvents), up: make(chan struct{}),
		cancel: cancel}
	l.wg.Go(func() { l.keep(ctx) })
	return l
}

// keep maintains an attachment until the link is closed.
func (l *Link) keep(ctx context.Context) {
	pause := redialFirst
	for ctx.Err() == nil {
		a, err := l.attach(ctx)
		l.mu.Lock()
		l.mu.lastErr = err
		l.mu.Unlock()
		if err != nil {
			sleep(ctx, pause)
			pause = min(2*pause, redialLast)
			continue
		}
		pause = redialFirst
		l.set(a)
		l.upOnce.Do(func() { close(l.up) })
		select {
		case <-a.broken:
		case <-ctx.Done():
			a.leave()
		}
		l.set(nil)
		l.wg.Go(a.end) // waits for the fence, which a stopped agent withholds
	}
}

func (l *Link) set(a *attachment) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.current = a
}

func (l *Link) attached() *attachment {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.current
}

// Wait waits for the first attachment.
func (l *Link) Wait(ctx context.Context) error {
	select {
	case <-l.up:
		return nil
	case <-ctx.Done():
		l.mu.Lock()
		defer l.mu.Unlock()
		return errors.Join(ctx.Err(), l.mu.lastErr)
	}
}

// Close leaves the agent: it withdraws registrations, and every session ends from the agent's side,
// so nothing touches the ranks' memory any more. It returns the events that were not taken.
func (l *Link) Close() (left []Event) {
	l.cancel()
	go func() {
		l.wg.Wait()
		close(l.events)
	}()
	for ev := range l.events {
		left = append(left, ev)
	}
	if l.lookups != nil {
		_ = l.lookups.Close() // nothing is asked any more
	}
	return left
}

// Events returns the jobs that have ended.
func (l *Link) Events() <-chan Event { return l.events }

// Submit sends a job to all ranks, or to none.
func (l *Link) Submit(j *Job) bool {
	a := l.attached()
	return a != nil && a.submit(j)
}

// Cancel asks every rank to end a job. Without an agent its end is reported anyway.
func (l *Link) Cancel(job uint64) {
	if a := l.attached(); a != nil {
		for _, s := range a.ranks {
			a.send(s, &ipc.Cancel{Job: job})
		}
	}
}

// Release releases a lease, if its attachment has not ended.
func (l *Link) Release(lease Lease) {
	if a := l.attached(); a != nil && a.number == lease.Attachment {
		a.send(a.scheduler, &ipc.Release{Leases: []uint64{lease.Number}})
	}
}

// Ask looks up and reserves; a late answer is a miss.
func (l *Link) Ask(q *Question) Answer {
	a := l.attached()
	if a == nil {
		return Answer{Failed: true}
	}
	if l.lookups == nil {
		l.lookups = DialLookup(a.lookupPath) // which an agent's later boots have too
	}
	l.blob = l.blob[:0]
	for i := range q.Hashes {
		l.blob = append(l.blob, q.Hashes[i][:]...)
	}
	reply, err := l.lookups.Ask(&ipc.LookupRequest{
		Space: a.space, Session: a.session, Want: ipc.WantReserve, Tokens: uint64(q.Tokens), HBMTokens: uint32(q.Own),
		DeadlineUS: uint32(l.cfg.LookupTimeout.Microseconds()), HashLen: len(Hash{}), Hashes: l.blob,
	}, l.cfg.LookupTimeout)
	if err != nil || reply.Boot != a.boot { // from another attachment: the lease must not be used
		return Answer{Failed: true}
	}
	return answer(a, &reply)
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// answer interprets a reply. A block that is stored but not pinned may still be loaded: if it was
// evicted by then, the load reports it.
func answer(a *attachment, r *ipc.LookupReply) Answer {
	switch r.Status {
	case ipc.LookupHit, ipc.LookupNoSession, ipc.LookupLeaseCap, ipc.LookupPending:
		found := Answer{Tokens: int(r.Tokens), Pending: r.Status == ipc.LookupPending}
		if r.Lease != 0 {
			found.Lease = Lease{Attachment: a.number, Number: r.Lease}
		}
		return found
	default:
		return Answer{Failed: r.Status == ipc.LookupOverloaded}
	}
}
