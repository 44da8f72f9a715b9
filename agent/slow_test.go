package agent

import (
	"net"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// A peer that asks and does not read slows itself down, is then disconnected, and costs the others
// nothing.
func TestPeerThatDoesNotRead(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.Limits.Outbox = 64 }))
	stays := r.stored()
	raw, err := net.Dial("unix", r.path(socketdir.Session))
	check(t, err)
	defer func() { check(t, raw.Close()) }()
	frame := func(m any) []byte {
		f, err := ipc.Encode(make([]byte, 4), m)
		check(t, err)
		f[2], f[3] = byte((len(f)-4)>>8), byte(len(f)-4)
		return f
	}
	_, err = raw.Write(frame(&ipc.Hello{MinVersion: ipc.Version, MaxVersion: ipc.Version}))
	check(t, err)
	// The answer of each has 8 KiB: a socket's buffers are full soon.
	many := frame(&ipc.Save{Job: 1, Event: ipc.None, Revoke: ipc.None,
		Sections: []ipc.Section{section(chain(1, 1000), 0)}})
	asked := make(chan int)
	go func() {
		n := 0
		for ; err == nil && n < 10000; n++ {
			_, err = raw.Write(many)
		}
		asked <- n
	}()
	r.waitFor("it is disconnected", func(admin.Status) bool { return r.agent.metrics.SessionEnds[endSlow].Load() == 1 })
	if n := <-asked; n == 10000 {
		t.Errorf("all %d questions were taken, though no answer was read", n)
	}
	if got := stays.load(1, 0, chain(1, 4), 9); !all(got, blockOK) {
		t.Errorf("load beside it: %v", got)
	}
}

// A peer that asks for much and reads late gets all answers and completions, in whatever mixture:
// its questions wait meanwhile.
func TestPeerThatReadsLate(t *testing.T) {
	r := newRig(t)
	c := r.dial()
	c.registered(c.registerWorker(register("late")))
	const rounds = 8000
	var sent atomic.Int64
	asked := make(chan error, 1)
	go func() {
		var err error
		for i := uint64(1); i <= 2*rounds && err == nil; i += 2 {
			for job := i; job < i+2 && err == nil; job++ {
				err = c.conn.Send(&ipc.Save{Job: job, Event: ipc.None, Revoke: ipc.None,
					Sections: []ipc.Section{section(chain(1, 1), 0)}})
			}
			if err == nil {
				err = c.conn.Send(&ipc.Ping{Req: 9})
			}
			sent.Add(1)
		}
		asked <- err
	}()
	before, stable := int64(0), 0
	pooltest.Until(t, "no more is taken", func() bool {
		now := sent.Load()
		if stable++; now != before {
			before, stable = now, 0
		}
		return stable == 100
	})
	for n := range 3 * rounds {
		select {
		case _, more := <-c.messages:
			if !more {
				t.Fatalf("the session ended after %d answers and completions: %v", n, c.last)
			}
		case <-time.After(patience):
			t.Fatalf("no more came after %d answers and completions", n)
		}
	}
	check(t, <-asked)
}

// One byte of a stored block is another than was stored, and only integrity full sees it.
func TestAFlippedByteIsSeen(t *testing.T) {
	for name, c := range map[string]struct {
		full bool
		want uint8
	}{"header": {false, blockOK}, "full": {true, blockCorrupt}} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, withConfig(func(cfg *Config) {
				if !c.full {
					cfg.Integrity = 1 // header
				}
			}))
			_, w, _ := r.joinEngine(register("a"))
			for i := range 4 {
				w[0].fill(i, byte(i+1))
			}
			w[0].save(1, chain(1, 2), 0)
			if got := w[0].load(1, 0, chain(1, 2), 8); !all(got, blockOK) || !w[0].filled(8, 1) {
				t.Fatalf("before the fault: %v", got)
			}
			w[0].save(1, chain(2, 2), 2)
			arena, _ := r.pool.Arena()
			arena[0] ^= 1
			got := w[0].load(1, 0, chain(1, 2), 8)
			if got[0] != c.want || got[1] != blockOK {
				t.Errorf("load of the damaged block and the one behind it: %v, want %d and 0", got, c.want)
			}
			if !c.full && w[0].filled(8, 1) {
				t.Error("no byte was flipped")
			}
		})
	}
}

// A region whose memory is taken away while it is registered makes blocks bad, and nothing else.
func TestRegionTakenAway(t *testing.T) {
	r := newRig(t)
	c := r.dial()
	m := register("thief")
	regions, fds, segments := c.prepare(m)
	soft, err := unix.MemfdCreate("unsealed", unix.MFD_CLOEXEC)
	check(t, err)
	defer func() { check(t, unix.Close(soft)) }()
	check(t, unix.Ftruncate(soft, testBlocks*testBlockBytes))
	fds[0] = soft
	c.send(m)
	c.send(regions, fds...)
	c.send(segments)
	if answer := next[*ipc.Registered](c); answer.Status != ipc.RegDone {
		t.Logf("refused: %s", answer.Text) // as good
		return
	}
	check(t, unix.Ftruncate(soft, 0))
	if got := c.save(1, chain(1, 2), 0); all(got, blockOK) {
		t.Errorf("save from nowhere: %v", got)
	}
	c.sync()
}
