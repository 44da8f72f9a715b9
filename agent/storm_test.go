package agent

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/agent/admin"
	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestMalformedStorm sends random bytes, cut and changed messages, and messages out of order, and
// expects the agent to serve its other peers.
func TestMalformedStorm(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := newRig(t)
	stays := r.stored()
	const peers, rounds = 4, 60
	var wg sync.WaitGroup
	for p := range peers {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(p)))
			for range rounds {
				storm(r, rng)
			}
		})
	}
	wg.Wait()
	if got := stays.load(1, 0, chain(1, 4), 9); !all(got, blockOK) {
		t.Errorf("load after the storm: %v", got)
	}
	r.waitFor("the storm is over", func(s admin.Status) bool { return s.Sessions == 2 && s.Engines == 1 })
}

// storm is one bad peer.
func storm(r *rig, rng *rand.Rand) {
	var d net.Dialer
	c, err := d.DialContext(context.Background(), "unix", r.path(socketdir.Session))
	if err != nil {
		r.t.Error(err)
		return
	}
	defer func() { _ = c.Close() }() // the agent may have been quicker
	_ = c.SetDeadline(time.Now().Add(patience))
	frames := goodFrames(rng)
	for range 1 + rng.IntN(8) {
		f := append([]byte(nil), frames[rng.IntN(len(frames))]...)
		switch rng.IntN(5) {
		case 0: // as it is
		case 1:
			f[rng.IntN(len(f))] ^= byte(1 << rng.IntN(8))
		case 2:
			f = f[:rng.IntN(len(f))]
		case 3:
			for i := range f[4:] {
				f[4+i] = byte(rng.Uint32())
			}
		case 4:
			binary.BigEndian.PutUint32(f, rng.Uint32())
		}
		if _, err := c.Write(f); err != nil {
			return // the agent has ended the session
		}
	}
}

// goodFrames returns proper frames, HELLO most often, so that storms get past the handshake.
func goodFrames(rng *rand.Rand) [][]byte {
	m := register("storm")
	m.Regions, m.Segments = 1, 1
	hello := &ipc.Hello{MinVersion: 1, MaxVersion: ipc.Version, Software: "storm"}
	var out [][]byte
	for _, msg := range []any{
		hello, hello, hello, m, schedulerOf(m), &ipc.Segments{Req: 1, List: []ipc.SegmentDesc{{Bytes: 1}}},
		&ipc.Unregister{Req: 1}, &ipc.Release{Leases: []uint64{1, rng.Uint64()}}, &ipc.Reset{Req: 1}, &ipc.Ping{Req: 1},
		&ipc.Save{Job: rng.Uint64(), Epoch: 1, Event: rng.Uint32(), Revoke: rng.Uint32(),
			Sections: []ipc.Section{section(chain(1, 3), 0)}},
		&ipc.Load{Job: rng.Uint64(), Epoch: 1, Event: rng.Uint32(), Lease: 1,
			Sections: []ipc.Section{section(chain(1, 3), 1<<30)}},
		&ipc.Cancel{Job: rng.Uint64()}, &ipc.Pong{Req: 1}, &ipc.Welcome{Version: ipc.Version},
		offer("storm", 2), offered("storm", 2), delivered("storm"),
	} {
		frame, err := ipc.Encode(make([]byte, 4), msg)
		if err != nil {
			panic(err)
		}
		binary.BigEndian.PutUint32(frame, uint32(len(frame)-4))
		out = append(out, frame)
	}
	return out
}

// A message that may not come now ends the session with ERROR, and the reason is counted.
func TestUnexpectedMessages(t *testing.T) {
	r := newRig(t)
	for name, send := range map[string]func(*client){
		"agent's own":   func(c *client) { c.send(&ipc.Pong{Req: 1}) },
		"second":        func(c *client) { c.send(schedulerOf(register("a"))); c.send(schedulerOf(register("b"))) },
		"HELLO again":   func(c *client) { c.send(&ipc.Hello{MinVersion: ipc.Version, MaxVersion: ipc.Version}) },
		"two jobs, one": func(c *client) { twoJobs(c) },
	} {
		t.Run(name, func(t *testing.T) {
			c := r.dial()
			before := r.agent.metrics.SessionEnds[endMalformed].Load()
			send(c)
			found := false
			for m := range c.messages {
				e, ok := m.(*ipc.Error)
				found = found || ok && e.Code == ipc.ErrCodeMalformed && e.Text != ""
			}
			if !found {
				t.Errorf("the session ended (%v) without an ERROR", c.last)
			}
			r.waitFor("it is counted",
				func(admin.Status) bool { return r.agent.metrics.SessionEnds[endMalformed].Load() == before+1 })
		})
	}
}

func twoJobs(c *client) {
	c.registered(c.registerWorker(register("jobs")))
	for range 2 {
		c.send(&ipc.Save{Job: 7, Epoch: 1, Step: 9, Event: ipc.None, Revoke: ipc.None,
			Sections: []ipc.Section{section(chain(1, 1), 0)}})
	}
}

// Sessions beyond the limit are told so.
func TestSessionLimit(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.Limits.Sessions = 2 }))
	first := r.dial()
	r.dial()
	pooltest.Until(t, "both are held", func() bool { return r.agent.sessions.places.Held() == 2 })
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, _, err := mockengine.DialSession(ctx, r.path(socketdir.Session), "third")
	if !contains(err, "allowed: 2 of all") {
		t.Fatalf("%v", err)
	}
	first.close()
	r.waitFor("there is room", func(s admin.Status) bool { return s.Sessions == 1 })
	open, newest := r.agent.Sessions()
	r.dial()
	if more, next := r.agent.Sessions(); open != 1 || more != 2 || next != newest+1 {
		t.Errorf("%d sessions, then %d; the newest are %d, and then %d", open, more, newest, next)
	}
}

// An engine whose parts do not come in time is let go.
func TestPartsMustComeInTime(t *testing.T) {
	r := newRig(t, withConfig(func(c *Config) { c.Limits.Parts = 20 * time.Millisecond }))
	c := r.dial()
	m := register("late")
	regions, fds, _ := c.prepare(m)
	c.send(m)
	c.send(regions, fds...)
	var said *ipc.Error
	for m := range c.messages {
		if e, ok := m.(*ipc.Error); ok {
			said = e
		}
	}
	if said == nil || said.Code != ipc.ErrCodeLimit {
		t.Fatalf("ERROR %+v", said)
	}
	r.waitFor("its place is free", func(s admin.Status) bool { return s.Engines == 0 && s.Sessions == 0 })
	if ends := r.logs.FilterMessage("session ended").FilterField(zap.Bool("registered", false)).Len(); ends != 1 {
		t.Error("the session's end counts as that of a registered one")
	}
}
