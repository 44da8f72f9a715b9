package agent

import (
	"math/rand/v2"
	"testing"
	"time"

	engines "github.com/kvagent/kvagent/cudaipc/engine"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/fault"
	"github.com/kvagent/kvagent/pool/pooltest"
	"github.com/kvagent/kvagent/pool/tier"
	"github.com/kvagent/kvagent/transfer"
)

// seatOf returns the registration of a client's session; nil: look-ups do not see it (any more).
func (r *rig) seatOf(c *client) *seat { return r.agent.registry.view.Load().seats[c.welcome.Session] }

// slowly makes the hand-over of a registration's held loads as slow as between says.
func (st *seat) slowly(between func()) {
	st.held.mu.Lock()
	defer st.held.mu.Unlock()
	start := st.held.start
	st.held.start = func(job *transfer.Job, sections []ipc.Section) pool.Status {
		between()
		return start(job, sections)
	}
}

// A load that is just being handed to the worker when its registration ends is over before
// UNREGISTERED, and a CANCEL that comes then finds no job.
func TestHeldLoadIsOverBeforeUnregistered(t *testing.T) {
	r, f, _, w, _ := held(t)
	handed, goOn := make(chan struct{}), make(chan struct{})
	r.seatOf(w).slowly(func() {
		close(handed)
		<-goOn
	})
	f.Switch(false)
	<-handed
	w.send(&ipc.Unregister{Req: 7})
	w.send(&ipc.Cancel{Job: w.job})
	pooltest.Until(t, "the end of the registration waits for the load", func() bool {
		select {
		case m := <-w.messages:
			close(goOn)
			t.Fatalf("%T %+v while a load is half-way to the worker", m, m)
		default:
		}
		return r.seatOf(w) == nil && pooltest.Parked("sync.Mutex.Lock", "agent.(*heldLoads).close")
	})
	close(goOn)
	if got := w.done(w.job); len(got) != 8 {
		t.Errorf("%d statuses", len(got))
	}
	next[*ipc.Unregistered](w)
	next[*ipc.Cancelled](w)
	w.sync()
}

// messageOrders is one session whose messages come in any order, and what must be true of the
// answers.
type messageOrders struct {
	t       *testing.T
	r       *rig
	f       *fault.Store
	w       *client
	random  *rand.Rand
	ask     func() ipc.LookupReply
	open    map[uint64]bool // jobs without DONE
	cancels map[uint64]int  // CANCELs without CANCELLED
	written [testBlocks]bool
	engines []*engines.Host
	seated  bool
}

const untouched = 0x5A

// TestMessageOrders registers, holds loads, cancels, unregisters and registers again, in any order,
// while a tier hangs and goes on: every job has one DONE, in the registration that it came in, and
// no load writes to another's blocks.
func TestMessageOrders(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r, f, _, w, q := slowTier(t, fault.Hang, tier.Tier{FetchWithin: time.Minute})
	look := r.asker(socketdir.Lookup)
	f.Switch(true)
	o := &messageOrders{
		t: t, r: r, f: f, w: w, random: rand.New(rand.NewPCG(seed, 0)), open: map[uint64]bool{},
		cancels: map[uint64]int{}, seated: true,
		ask: func() ipc.LookupReply { return askRaw(t, look, q) },
	}
	t.Cleanup(func() {
		for _, e := range o.engines {
			check(t, e.Close())
		}
	})
	o.mark()
	for range 400 {
		o.step()
	}
	f.Switch(false)
	if o.seated {
		o.unregister()
	}
	t.Logf("%d loads were held", r.agent.metrics.LoadsHeld.Load()) // TestLoadIsHeldForPromises expects one to be
}

func (o *messageOrders) step() {
	switch p := o.random.IntN(100); {
	case !o.seated:
		o.register()
	case p < 40:
		o.load()
	case p < 60:
		o.cancel()
	case p < 80:
		o.f.Switch(false)
	case p < 90:
		o.w.send(&ipc.Ping{Req: 8}) // lets the agent come to the end of what was sent
		until[*ipc.Pong](o)
	default:
		o.unregister()
	}
}

// mark prepares a new registration: slow hand-overs, and blocks that say whether they were written.
func (o *messageOrders) mark() {
	o.written = [testBlocks]bool{}
	for b := range testBlocks {
		o.w.fill(b, untouched)
	}
	wait := make([]time.Duration, 4096)
	for i := range wait {
		wait[i] = time.Duration(o.random.IntN(400)) * time.Microsecond
	}
	o.r.seatOf(o.w).slowly(func() { // one call at a time
		time.Sleep(wait[0]) // the subject: a hand-over that other messages overtake, or not
		wait = wait[1:]
	})
}

func (o *messageOrders) register() {
	o.t.Helper()
	o.engines = append(o.engines, o.w.engine)
	o.w.registered(o.registerAgain())
	o.seated = true
	o.mark()
}

// registerAgain is registerWorker, with whatever comes of CANCELs before the answer.
func (o *messageOrders) registerAgain() *ipc.Registered {
	m := register("reader")
	regions, fds, segments := o.w.prepare(m)
	o.w.send(m)
	o.w.send(regions, fds...)
	o.w.send(segments)
	return until[*ipc.Registered](o)
}

func (o *messageOrders) load() {
	at := uint32(o.random.IntN(testBlocks - 8))
	if o.random.IntN(2) == 0 {
		o.f.Switch(true)
		o.r.drop(chain(1, 8))
	}
	lease := o.ask().Lease
	o.w.job++
	o.open[o.w.job] = true
	o.w.send(&ipc.Load{Job: o.w.job, Epoch: 1, Event: ipc.None, Lease: lease, Sections: []ipc.Section{section(chain(1,
		8), at)}})
	for b := at; b < at+8; b++ {
		o.written[b] = true
	}
}

// cancel cancels any of the last jobs, ended or not.
func (o *messageOrders) cancel() {
	if o.w.job == 0 {
		return
	}
	job := o.w.job - uint64(o.random.IntN(int(min(o.w.job, 4))))
	o.cancels[job]++
	o.w.send(&ipc.Cancel{Job: job})
}

func (o *messageOrders) unregister() {
	o.t.Helper()
	old := o.w.kv
	o.w.send(&ipc.Unregister{Req: 7})
	if o.random.IntN(2) == 0 {
		o.cancel()
	}
	until[*ipc.Unregistered](o)
	if len(o.open) > 0 {
		o.t.Fatalf("UNREGISTERED before the DONE of %v", o.open)
	}
	for b, may := range o.written {
		if block := old.Mem[b*testBlockBytes:]; !may && (block[0] != untouched || block[77] != untouched^77) {
			o.t.Fatalf("WRONG BYTES: block %d was written, and no load of this registration names it", b)
		}
	}
	o.seated = false
}

// until is next that takes the ends of jobs which come before it.
func until[T any](o *messageOrders) T {
	o.t.Helper()
	limit := time.After(patience)
	for {
		select {
		case m, more := <-o.w.messages:
			if !more {
				o.t.Fatalf("the session ended: %v", o.w.last)
			}
			switch m := m.(type) {
			case T:
				return m
			case *ipc.Done:
				if !o.open[m.Job] {
					o.t.Fatalf("DONE of job %d, which is not open", m.Job)
				}
				delete(o.open, m.Job)
			case *ipc.Cancelled:
				if o.cancels[m.Job]--; o.cancels[m.Job] < 0 || o.open[m.Job] {
					o.t.Fatalf("CANCELLED of job %d, open %v", m.Job, o.open[m.Job])
				}
			case *ipc.Switches, *ipc.Epoch:
			default:
				o.t.Fatalf("%T %+v instead of a %T", m, m, *new(T))
			}
		case <-limit:
			o.t.Fatalf("no %T came; open are %v", *new(T), o.open)
		}
	}
}
