package peer

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// valve is the server's end of a connection. It can be frozen, as if the server were stopped, or
// partitioned: then what either side sends is lost. Nothing tells the other side.
type valve struct {
	net.Conn
	mu     sync.Mutex
	reads  chan struct{} // not nil: Read waits until it is closed
	writes chan struct{} // not nil: so does Write
	lost   bool          // partitioned
	ended  chan struct{}
	once   sync.Once
}

func newValve(c net.Conn) *valve { return &valve{Conn: c, ended: make(chan struct{})} }

func (v *valve) freeze(reads, writes bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if reads {
		v.reads = make(chan struct{})
	}
	if writes {
		v.writes = make(chan struct{})
	}
	v.lost = !reads && !writes
}

func (v *valve) thaw() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, c := range []*chan struct{}{&v.reads, &v.writes} {
		if *c != nil {
			close(*c)
			*c = nil
		}
	}
}

// pass waits while one direction is frozen, and reports whether the valve is partitioned.
func (v *valve) pass(frozen *chan struct{}) (lost bool, err error) {
	v.mu.Lock()
	c, lost := *frozen, v.lost
	v.mu.Unlock()
	if c == nil {
		return lost, nil
	}
	select {
	case <-c:
		return lost, nil
	case <-v.ended:
		return lost, net.ErrClosed
	}
}

func (v *valve) Read(p []byte) (int, error) {
	for {
		if _, err := v.pass(&v.reads); err != nil {
			return 0, err
		}
		n, err := v.Conn.Read(p)
		lost, stop := v.pass(&v.reads)
		if stop != nil {
			return 0, stop
		}
		if !lost || err != nil {
			return n, err
		}
	}
}

func (v *valve) Write(p []byte) (int, error) {
	lost, err := v.pass(&v.writes)
	if lost || err != nil {
		return len(p), err
	}
	return v.Conn.Write(p)
}

func (v *valve) Close() error {
	v.once.Do(func() { close(v.ended) })
	return v.Conn.Close()
}

// valves is a listener whose connections can freeze.
type valves struct {
	*pipes
	mu  sync.Mutex
	all []*valve
}

func (l *valves) Accept() (net.Conn, error) {
	c, err := l.pipes.Accept()
	if err != nil {
		return nil, err
	}
	v := newValve(c)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, v)
	return v, nil
}

func (l *valves) each(do func(v *valve)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, v := range l.all {
		do(v)
	}
}

// frozen is two agents over connections that can freeze, on a fake clock.
type frozen struct {
	p, d   *agent
	net    *valves
	server *Server
	client *Client
}

// inBubble runs a test on a fake clock.
func inBubble(t *testing.T, spec func(*Config, *ClientConfig), f func(t *testing.T, w *frozen)) {
	synctest.Test(t, func(t *testing.T) {
		s := specOf(1, 64<<10)
		w := &frozen{p: newAgent(t, 16<<20, s), d: newAgent(t, 16<<20, s), net: &valves{pipes: newPipes()}}
		cfg, ccfg := w.p.config(), w.d.clientConfig()
		ccfg.Dial = w.net.dial
		if spec != nil {
			spec(&cfg, &ccfg)
		}
		w.server, w.client = serveOn(t, w.net, cfg), newClient(t, ccfg)
		f(t, w)
	})
}

// TestFrozenPeer: a peer that stops reading, writing or both, or is partitioned, costs the timeout
// and a recompute, in whatever state the fetch is.
func TestFrozenPeer(t *testing.T) {
	for _, side := range []struct {
		name          string
		reads, writes bool
	}{
		{"reads nothing", true, false}, {"writes nothing", false, true}, {"is stopped", true, true},
		{"is partitioned", false, false},
	} {
		for _, waiting := range []bool{false, true} {
			t.Run(fmt.Sprint(side.name, ", waiting ", waiting), func(t *testing.T) {
				inBubble(t, nil, func(t *testing.T, w *frozen) {
					h := chain("a", 40)
					w.p.save(h.Slice(0, 20))
					w.p.set("r", Open, 0)
					var at time.Time
					n := 0
					r := w.d.request("r", h)
					got, err := fetchWith(t.Context(), t, w.client, "p", r, func(blocks int, _ int64) {
						n += blocks
						switch {
						case !at.IsZero():
						case waiting && n == 40: // all of it has arrived, and the next is waited for
							at = time.Now()
							w.net.each(func(v *valve) { v.freeze(side.reads, side.writes) })
						case !waiting && n >= 10: // more is on the road
							at = time.Now()
							w.net.each(func(v *valve) { v.freeze(side.reads, side.writes) })
						}
					})
					took := time.Since(at)
					if !errors.Is(err, ErrLost) || got.End != EndLost || got.Blocks == 0 {
						t.Errorf("%+v, %v", got, err)
					}
					if limit := DefaultTimeout*9/8 + DefaultTimeout; took > limit {
						t.Errorf("it took %v", took)
					}
					if w.d.has(h) != got.Blocks {
						t.Errorf("%d blocks, %+v", w.d.has(h), got)
					}
					w.d.nothingLeft()
					// The server holds nothing for it after that, or once it runs again.
					time.Sleep(3 * DefaultTimeout)
					w.net.each((*valve).thaw)
					synctest.Wait()
					if st := w.server.Stats(); st.Subscriptions != 0 || st.Connections != 0 {
						t.Errorf("%+v", st)
					}
					w.p.nothingLeft()
				})
			})
		}
	}
}

// TestFrozenClient: a client that stops reading or writing costs the server nothing after the
// timeout, and no other client waits for it.
func TestFrozenClient(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, w *frozen) {
		h := chain("a", 40)
		w.p.save(h)
		w.p.set("r", Open, 0)
		auth := testKey(t, 1)
		raw, err := w.net.dial(t.Context(), "p")
		check(t, err)
		c, err := dialled(t.Context(), raw, "p", &auth, time.Minute)
		check(t, err)
		m := get{space: w.p.spec.Fingerprint, length: 64 << 10, hashes: h.Slice(0, 8)}
		check(t, c.send(kindGet, 1, m.encode(nil)))
		synctest.Wait() // the server is writing now, and pins what it writes
		if s := w.p.Stats(); s.PinnedEntries != 8 {
			t.Errorf("%d entries are pinned", s.PinnedEntries)
		}
		start := time.Now()
		if got, err := fetchAll(t, w.client, "p", w.d.request("", h)); err != nil || got.Blocks != 80 {
			t.Errorf("%+v, %v", got, err)
		}
		if took := time.Since(start); took > 0 {
			t.Errorf("another client waited %v", took)
		}
		time.Sleep(DefaultTimeout*9/8 + time.Millisecond)
		synctest.Wait()
		if s := w.p.Stats(); s.PinnedEntries != 0 {
			t.Errorf("%d entries are pinned for a client that is gone", s.PinnedEntries)
		}
		if st := w.server.Stats(); st.Lost != 1 || st.Connections != 2 {
			t.Errorf("%+v", st)
		}
		raw.Close()
	})
}

// TestFullGetQueue: a client that asks for more than the server queues, and takes none of it, is
// lost after the timeout like another one.
func TestFullGetQueue(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, w *frozen) {
		h := chain("a", 1)
		w.p.save(h)
		auth := testKey(t, 1)
		raw, err := w.net.dial(t.Context(), "p")
		check(t, err)
		defer raw.Close()
		c, err := dialled(t.Context(), raw, "p", &auth, time.Minute)
		check(t, err)
		m := get{space: w.p.spec.Fingerprint, length: 64 << 10, hashes: h}
		for id := range uint32(getQueue + 2) { // one is being answered, one waits for room in the queue
			check(t, c.send(kindGet, id, m.encode(nil)))
			synctest.Wait()
		}
		if st := w.server.Stats(); st.Connections != 1 {
			t.Errorf("%+v", st)
		}
		time.Sleep(DefaultTimeout*9/8 + time.Millisecond)
		synctest.Wait()
		if st := w.server.Stats(); st.Connections != 0 || st.Lost != 1 {
			t.Errorf("the connection is not ended: %+v", st)
		}
		w.p.nothingLeft()
	})
}

// TestKilledClient: what is pinned for a client is released when its connection ends.
func TestKilledClient(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, w *frozen) {
		h := chain("a", 40)
		w.p.save(h)
		auth := testKey(t, 1)
		raw, err := w.net.dial(t.Context(), "p")
		check(t, err)
		c, err := dialled(t.Context(), raw, "p", &auth, time.Minute)
		check(t, err)
		for id := range uint32(5) {
			m := get{space: w.p.spec.Fingerprint, length: 64 << 10, hashes: h.Slice(0, 8)}
			check(t, c.send(kindGet, id, m.encode(nil)))
		}
		synctest.Wait()
		if s := w.p.Stats(); s.PinnedEntries != 8 {
			t.Errorf("%d entries are pinned", s.PinnedEntries)
		}
		raw.Close()
		synctest.Wait()
		if s := w.p.Stats(); s.PinnedEntries != 0 || s.Pinned != 0 {
			t.Errorf("%d entries are pinned after the connection ended", s.PinnedEntries)
		}
	})
}

// late is a connection whose time is over before its bytes are read, as after a stop of this
// process.
type late struct {
	net.Conn
	reads int
}

func (l *late) SetReadDeadline(time.Time) error { return nil }

func (l *late) Read(p []byte) (int, error) {
	if l.reads++; l.reads == 1 {
		return 0, os.ErrDeadlineExceeded
	}
	return len(p), nil
}

// TestStoppedHere: a peer whose bytes have come while this process was stopped is not lost.
func TestStoppedHere(t *testing.T) {
	c := &conn{raw: &late{}, timeout: time.Second}
	if err := c.readFull(make([]byte, 10)); err != nil {
		t.Error(err)
	}
}
