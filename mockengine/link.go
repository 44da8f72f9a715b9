package mockengine

import (
	"context"
	"errors"
	"sync"
	"time"
)

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
	ranks  *workers
	events chan Event
	asker  asker

	mu struct {
		sync.Mutex
		current     *attachment // nil: none
		attachments uint32
		software    string
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
	l := &Link{cfg: cfg, where: where, ranks: w.w, events: make(chan Event, linkEvents), up: make(chan struct{}),
		cancel: cancel}
	l.asker.timeout = cfg.LookupTimeout
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

// Space returns the fingerprint of the engine's space; ok is false without an agent.
func (l *Link) Space() (space [16]byte, ok bool) {
	a := l.attached()
	if a == nil {
		return space, false
	}
	return a.space, true
}

// AgentPid returns the agent's process as the kernel names it; 0 without an agent.
func (l *Link) AgentPid() int {
	a := l.attached()
	if a == nil {
		return 0
	}
	return a.pid
}

// Attachments returns how often the link was attached.
func (l *Link) Attachments() uint32 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mu.attachments
}

// LookupPath returns the path of the look-up socket; empty without an agent.
func (l *Link) LookupPath() string {
	a := l.attached()
	if a == nil {
		return ""
	}
	return a.lookupPath
}

// Close leaves the agent: it withdraws registrations, and every session ends from the agent's side,
// so nothing touches the ranks' memory any more. It returns the events that were not taken.
func (l *Link) Close() (left []Event) {
	l.cancel()
	done := make(chan struct{})
	go func() {
		l.wg.Wait()
		close(done)
	}()
	for {
		select {
		case ev := <-l.events:
			left = append(left, ev)
		case <-done:
			l.asker.close()
			for {
				select {
				case ev := <-l.events:
					left = append(left, ev)
				default:
					return left
				}
			}
		}
	}
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
		a.cancel(job)
	}
}

// Release releases a lease, if its attachment has not ended.
func (l *Link) Release(lease Lease) {
	if a := l.attached(); a != nil && a.number == lease.Attachment {
		a.release(lease.Number)
	}
}

// Ask looks up and reserves.
func (l *Link) Ask(q *Question) Answer {
	a := l.attached()
	if a == nil {
		return Answer{Failed: true}
	}
	return l.asker.ask(a, q)
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
