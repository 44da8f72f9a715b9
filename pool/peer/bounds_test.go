package peer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/pooltest"
)

// TestHeartbeats: a fetch that waits for long keeps its connections, without a byte of blocks.
func TestHeartbeats(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, w *frozen) {
		h := chain("a", 10)
		w.p.set("r", Open, 0)
		r := w.d.request("r", h)
		r.Wait = MaxWait
		start := time.Now()
		go func() {
			time.Sleep(5 * time.Minute)
			w.p.save(h)
			w.p.set("r", Complete, 160)
		}()
		got, err := fetchAll(t, w.client, "p", r)
		if took := time.Since(start); err != nil || got.Blocks != 20 || took != 5*time.Minute {
			t.Errorf("%+v, %v after %v", got, err, took)
		}
		time.Sleep(31 * time.Second) // nothing uses the connections
		synctest.Wait()
		if st := w.server.Stats(); st.Connections != 0 || st.Lost != 0 || st.Accepted != 2 {
			t.Errorf("idle connections: %+v", st)
		}
		if st := w.client.Stats(); st.Peers[0].State != "idle" {
			t.Errorf("%+v", st)
		}
	})
}

// countedIndex counts look-ups.
type countedIndex struct {
	pool.Index
	n atomic.Int32
}

func (x *countedIndex) Exists(s pool.SpaceID, group uint8, h pool.Hashes, present []bool) {
	x.n.Add(1)
	x.Index.Exists(s, group, h, present)
}

// TestCommitsOfOthers: many commits in a moment cost a subscription at most one look-up. Their
// blocks are announced after the pause, and the end of the transfer does not wait for it.
func TestCommitsOfOthers(t *testing.T) {
	index := &countedIndex{}
	counted := func(c *Config, _ *ClientConfig) { index.Index, c.Index = c.Index, index }
	inBubble(t, counted, func(t *testing.T, w *frozen) {
		h := chain("a", 10)
		w.p.set("r", Open, 0)
		var all sync.WaitGroup
		var got Result
		var err error
		all.Go(func() { got, err = fetchAll(t, w.client, "p", w.d.request("r", h)) })
		synctest.Wait()
		before, start := index.n.Load(), time.Now()
		for range 100 {
			w.p.change(func() {})
			synctest.Wait()
		}
		w.p.save(h.Slice(0, 4))
		if n := index.n.Load() - before; n > 2 {
			t.Errorf("100 commits of others cost %d look-ups of a group", n)
		}
		time.Sleep(announcePause)
		synctest.Wait()
		if n := w.d.has(h); n != 8 {
			t.Errorf("%d blocks are there after the pause, want 8", n)
		}
		w.p.save(h.Slice(4, 8))
		w.p.set("r", Complete, 128)
		w.p.change(func() {})
		all.Wait()
		if took := time.Since(start); err != nil || got.Blocks != 16 || took > 2*announcePause {
			t.Errorf("%+v, %v after %v", got, err, took)
		}
	})
}

// TestWait: the peer waits as long as it was asked to, and what it has by then arrives.
func TestWait(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, w *frozen) {
		h := chain("a", 10)
		w.p.save(h.Slice(0, 4))
		w.p.set("r", Open, 160)
		r := w.d.request("r", h)
		r.Wait = 7 * time.Second
		start := time.Now()
		got, err := fetchAll(t, w.client, "p", r)
		if took := time.Since(start); err != nil || got.End != EndWaited || got.Blocks != 8 || got.Tokens != 160 ||
			took != r.Wait {
			t.Errorf("%+v, %v after %v", got, err, took)
		}
		r = w.d.request("never", h)
		start = time.Now()
		if got, err = fetchAll(t, w.client, "p", r); err != nil || got.End != EndUnknown || time.Since(start) > 0 {
			t.Errorf("unknown: %+v, %v", got, err)
		}
		r.Early, r.Wait = true, time.Second
		if got, err = fetchAll(t, w.client, "p", r); err != nil || got.End != EndWaited || time.Since(start) != r.Wait {
			t.Errorf("early: %+v, %v", got, err)
		}
		go func() {
			time.Sleep(time.Second)
			w.p.set("r", Unknown, 0)
		}()
		if got, err = fetchAll(t, w.client, "p", w.d.request("r", h)); err != nil || got.End != EndExpired {
			t.Errorf("expired: %+v, %v", got, err)
		}
	})
}

// TestSilentServerEnds: a server that only sends heartbeats, and never END, does not hold a fetch
// for longer than its wait.
func TestSilentServerEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newAgent(t, 1<<20, specOf(1, 4096))
		l := newPipes()
		cfg := Config{Auth: testKey(t, 1), Timeout: time.Minute}
		go func() {
			for {
				raw, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer raw.Close()
					c, err := accepted(raw, &cfg, func() {})
					if err != nil {
						return
					}
					ended := make(chan struct{})
					defer close(ended)
					go c.heartbeats(ended)
					_, _ = io.Copy(io.Discard, raw)
				}()
			}
		}()
		ccfg := d.clientConfig()
		ccfg.Dial = l.dial
		client := newClient(t, ccfg)
		t.Cleanup(func() { l.Close() })
		r := d.request("r", chain("a", 4))
		r.Wait = 10 * time.Second
		start := time.Now()
		_, err := fetchAll(t, client, "p", r)
		if took := time.Since(start); !errors.Is(err, ErrLost) || took > r.Wait+2*DefaultTimeout {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// TestStrangers: connections that do not authenticate are few, read little, and are gone in time.
func TestStrangers(t *testing.T) {
	few := func(c *Config, _ *ClientConfig) { c.Limits.Pending = 3 }
	inBubble(t, few, func(t *testing.T, w *frozen) {
		var strangers []net.Conn
		for i := range 5 {
			c, err := w.net.dial(t.Context(), "p")
			check(t, err)
			defer c.Close()
			synctest.Wait()
			strangers = append(strangers, c)
			if got := w.server.Stats().Pending; got != min(i+1, 3) {
				t.Errorf("%d are pending after %d", got, i+1)
			}
		}
		if n := w.server.Stats().RefusedPending; n != 2 {
			t.Errorf("%d were refused", n)
		}
		start := time.Now()
		for _, c := range strangers {
			_, _ = io.Copy(io.Discard, c)
		}
		if took := time.Since(start); took != handshakeTime {
			t.Errorf("it took %v", took)
		}
		synctest.Wait()
		if st := w.server.Stats(); st.Pending != 0 || st.Unauthenticated != 5 {
			t.Errorf("%+v", st)
		}
		// One that sends without end is cut off by the first frame that is none.
		c, err := w.net.dial(t.Context(), "p")
		check(t, err)
		n := 0
		for err == nil {
			var k int
			k, err = c.Write(make([]byte, 100))
			n += k
		}
		if n > headerBytes {
			t.Errorf("it read %d bytes", n)
		}
		h := chain("a", 2)
		w.p.save(h)
		if got, err := fetchAll(t, w.client, "p", w.d.request("", h)); err != nil || got.Blocks != 4 {
			t.Errorf("%+v, %v", got, err)
		}
	})
}

// TestStrangersGiveWay: strangers that hold all places keep no agent out, wherever they come from.
func TestStrangersGiveWay(t *testing.T) {
	spec := specOf(1, 4096)
	for name, from := range map[string]func(i int) string{
		"from another host":  func(int) string { return "127.0.0.2" },
		"from the same host": func(int) string { return "127.0.0.1" },
		"from many hosts":    func(i int) string { return fmt.Sprintf("127.0.1.%d", i+1) },
	} {
		t.Run(name, func(t *testing.T) {
			p, d := newAgent(t, 16<<20, spec), newAgent(t, 16<<20, spec)
			h := chain("a", 2)
			p.save(h)
			s := serve(t, p.config())
			for i := range s.cfg.Limits.Pending {
				local := &net.TCPAddr{IP: net.ParseIP(from(i))}
				c, err := (&net.Dialer{LocalAddr: local}).Dial("tcp", s.Addr().String())
				check(t, err)
				defer c.Close()
			}
			full := s.cfg.Limits.Pending * (knownShare - 1) / knownShare // the rest is kept
			pooltest.Until(t, "strangers", func() bool { return s.strangers.Taken() == full })
			got, err := fetchAll(t, newClient(t, d.clientConfig()), s.Addr().String(), d.request("", h))
			if err != nil || got.Blocks != 4 {
				t.Errorf("strangers keep agents out: %+v, %v", got, err)
			}
		})
	}
}

// TestGate: a TLS handshake can make a side read so much and no more.
func TestGate(t *testing.T) {
	client, server := net.Pipe()
	defer client.Close()
	go func() {
		for {
			if _, err := client.Write(make([]byte, 1000)); err != nil {
				return
			}
		}
	}()
	g := &gate{server, maxHandshake}
	n, err := io.Copy(io.Discard, g)
	server.Close()
	if n != maxHandshake || !errors.Is(err, errHandshakeSize) {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestServerLimits: more connections, subscriptions and hashes than allowed are refused at once,
// and counted.
func TestServerLimits(t *testing.T) {
	few := func(c *Config, cc *ClientConfig) {
		c.Limits.Connections, c.Limits.Subscriptions = 2, 2
		cc.Streams = 2
	}
	inBubble(t, few, func(t *testing.T, w *frozen) {
		w.p.set("r", Open, 0)
		var all sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		fetch := func(blocks int, c *Client) (Result, error) {
			r := w.d.request("r", chain("a", blocks))
			r.Groups = r.Groups[:1]
			return c.Fetch(ctx, "p", r, nil)
		}
		for range 2 {
			all.Go(func() { _, _ = fetch(10, w.client) })
		}
		synctest.Wait()
		if st := w.server.Stats(); st.Subscriptions != 2 || st.Held == 0 || st.Connections != 2 {
			t.Errorf("%+v", st)
		}
		if got, err := fetch(10, w.client); err != nil || got.End != EndRefused {
			t.Errorf("a third one: %+v, %v", got, err)
		}
		ccfg := w.d.clientConfig()
		ccfg.Dial = w.net.dial
		other := newClient(t, ccfg)
		if _, err := fetch(10, other); !errors.Is(err, ErrLost) {
			t.Errorf("a third connection: %v", err)
		}
		cancel()
		all.Wait()
		synctest.Wait()
		if st := w.server.Stats(); st.Subscriptions != 0 || st.Held != 0 || st.Refused == 0 ||
			st.Ended[EndRefused] != 1 || st.Ended[EndCancelled] != 2 {
			t.Errorf("%+v", st)
		}
	})
}

// TestPeerBytes: the subscriptions of one host hold no more memory than it may, over whatever
// connections, nor do all together. One more is refused before it is read into memory, and its
// connection goes on.
func TestPeerBytes(t *testing.T) {
	const minPeerBytes = 4 << 20 // more than the largest subscription
	for name, limit := range map[string]Limits{
		"of a host": {PeerBytes: minPeerBytes}, "of all": {PeerBytes: minPeerBytes, Bytes: minPeerBytes},
	} {
		t.Run(name, func(t *testing.T) {
			few := func(c *Config, cc *ClientConfig) { c.Limits, cc.Streams = limit, 1 }
			inBubble(t, few, func(t *testing.T, w *frozen) {
				w.p.set("r", Open, 0)
				ccfg := w.d.clientConfig()
				ccfg.Dial = w.net.dial
				clients := []*Client{w.client, newClient(t, ccfg)}
				var all sync.WaitGroup
				ctx, cancel := context.WithCancel(t.Context())
				fetch := func(blocks int, c *Client) (Result, error) {
					r := w.d.request("r", chain("a", blocks))
					r.Groups = r.Groups[:1]
					return c.Fetch(ctx, "p", r, nil)
				}
				all.Go(func() { _, _ = fetch(MaxHashes, clients[0]) })
				synctest.Wait()
				one := w.server.Stats().Held
				if least := int64(MaxHashes * 33); one < least || one > largestSubscription {
					t.Errorf("the largest one holds %d bytes, want %d to %d", one, least, largestSubscription)
				}
				for _, c := range clients {
					if got, err := fetch(MaxHashes, c); err != nil || got.End != EndRefused {
						t.Errorf("a second one: %+v, %v", got, err)
					}
				}
				if held := w.server.Stats().Held; held != one {
					t.Errorf("a refused one holds %d bytes", held-one)
				}
				for _, v := range w.connections() {
					if cap(v.payload) > 4<<10 {
						t.Errorf("a refused one was read into %d bytes", cap(v.payload))
					}
				}
				for _, c := range clients {
					all.Go(func() { _, _ = fetch(100, c) })
				}
				synctest.Wait()
				if st := w.server.Stats(); st.Subscriptions != 3 || st.Held-one < 2*subscriptionBytes {
					t.Errorf("small ones: %+v", st)
				}
				cancel()
				all.Wait()
				synctest.Wait()
				if st := w.server.Stats(); st.Held != 0 || st.Lost != 0 || st.Malformed != 0 {
					t.Errorf("left: %+v", st)
				}
			})
		})
	}
}

// connections returns the server's connections.
func (w *frozen) connections() (all []*served) {
	w.server.mu.Lock()
	defer w.server.mu.Unlock()
	for v := range w.server.conns {
		all = append(all, v)
	}
	return all
}

// TestBudget: a host has its share as long as all together have room.
func TestBudget(t *testing.T) {
	b := newBudget(&Limits{PeerBytes: 10, Bytes: 15})
	for i, c := range []struct {
		host string
		n    int64
		want bool
	}{
		{"a", 11, false}, {"a", 10, true}, {"a", 1, false}, {"b", 6, false}, {"b", 5, true}, {"c", 1, false},
		{"a", -4, true}, {"b", 4, true}, {"a", -6, true}, {"b", -9, true}, {"a", 10, true}, {"a", -10, true},
	} {
		if c.n < 0 {
			b.give(c.host, -c.n)
		} else if got := b.take(c.host, c.n); got != c.want {
			t.Errorf("%d: %d bytes for %s: %v", i, c.n, c.host, got)
		}
	}
	if b.taken() != 0 || len(b.of) != 0 {
		t.Errorf("left: %d bytes, %v", b.taken(), b.of)
	}
}

// TestBreaker: an address that fails is left alone for a while that doubles, and one that works
// again is used at once.
func TestBreaker(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, w *frozen) {
		h := chain("a", 2)
		w.p.save(h)
		up, dials := false, 0
		w.client.cfg.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
			if dials++; !up {
				return nil, errors.New("no road")
			}
			return w.net.dial(ctx, addr)
		}
		r := w.d.request("", h)
		for _, pause := range []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second} {
			if _, err := fetchAll(t, w.client, "p", r); !errors.Is(err, ErrLost) ||
				!strings.Contains(err.Error(), "no road") {
				t.Fatalf("%v", err)
			}
			before := dials
			time.Sleep(pause - 1)
			if _, err := fetchAll(t, w.client, "p", r); !errors.Is(err, ErrSuspended) || dials != before {
				t.Fatalf("%v, %d dials", err, dials-before)
			}
			if st := w.client.Stats().Peers[0]; st.State != "open" || st.Error == "" {
				t.Errorf("%+v", st)
			}
			time.Sleep(time.Nanosecond)
		}
		up = true
		if got, err := fetchAll(t, w.client, "p", r); err != nil || got.Blocks != 4 {
			t.Fatalf("%+v, %v", got, err)
		}
		if st := w.client.Stats(); st.Peers[0].State != "up" || st.Peers[0].Opened != 3 || st.Suspended != 3 ||
			st.Done[EndLost] != 6 || st.Done[EndComplete] != 1 {
			t.Errorf("%+v", st)
		}
		// A read that the caller ends says nothing about the peer.
		ctx, cancel := context.WithCancel(t.Context())
		w.client.cfg.Dial = func(ctx context.Context, _ string) (net.Conn, error) {
			cancel()
			<-ctx.Done()
			return nil, ctx.Err()
		}
		if got, err := fetchWith(ctx, t, w.client, "q", r, nil); !errors.Is(err, context.Canceled) ||
			got.End != EndCancelled {
			t.Errorf("%+v, %v", got, err)
		}
		if st := w.client.Stats().Peers[1]; st.Opened != 0 {
			t.Errorf("%+v", st)
		}
	})
}

// TestDialTimeout: a peer that accepts and says nothing costs the timeout.
func TestDialTimeout(t *testing.T) {
	inBubble(t, nil, func(t *testing.T, w *frozen) {
		w.client.cfg.Dial = func(context.Context, string) (net.Conn, error) {
			here, there := net.Pipe()
			t.Cleanup(func() { there.Close() })
			go func() { _, _ = io.Copy(io.Discard, there) }()
			return here, nil
		}
		start := time.Now()
		_, err := fetchAll(t, w.client, "p", w.d.request("", chain("a", 2)))
		if took := time.Since(start); !errors.Is(err, ErrLost) || took != DefaultTimeout {
			t.Errorf("%v after %v", err, took)
		}
	})
}

// TestClientLimits: more fetches than allowed are refused, and addresses beyond the limit give way.
func TestClientLimits(t *testing.T) {
	few := func(_ *Config, c *ClientConfig) { c.Fetches, c.Peers = 2, 3 }
	inBubble(t, few, func(t *testing.T, w *frozen) {
		h := chain("a", 2)
		w.p.save(h)
		for i := range 5 {
			if _, err := fetchAll(t, w.client, fmt.Sprint("p", i), w.d.request("", h)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second)
		}
		st := w.client.Stats()
		if len(st.Peers) != 3 || st.Peers[0].Peer != "p2" {
			t.Errorf("%+v", st.Peers)
		}
		w.p.set("r", Open, 0)
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for range 2 {
			all.Go(func() { _, _ = w.client.Fetch(ctx, "p4", w.d.request("r", chain("b", 2)), nil) })
		}
		synctest.Wait()
		if got, err := fetchAll(t, w.client, "p4", w.d.request("", h)); !errors.Is(err, ErrBusy) ||
			got.Failed[NotStored] != 4 {
			t.Errorf("%+v, %v", got, err)
		}
		if err := w.client.Delivered(ctx, "p4", w.d.spec.Fingerprint, "r"); err != nil {
			t.Errorf("a delivery is not told while as many fetches run as may: %v", err)
		}
		cancel()
		all.Wait()
	})
}

// TestClose: Close ends what is running, on both sides, and nothing works afterwards.
func TestClose(t *testing.T) {
	for _, side := range []string{"client", "server"} {
		t.Run(side, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, w *frozen) {
				h := chain("a", 40)
				w.p.save(h.Slice(0, 20))
				w.p.set("r", Open, 0)
				result := make(chan error, 1)
				go func() {
					_, err := w.client.Fetch(t.Context(), "p", w.d.request("r", h), nil)
					result <- err
				}()
				synctest.Wait()
				want := ErrClosed
				if side == "client" {
					check(t, w.client.Close())
				} else {
					check(t, w.server.Close())
					want = ErrLost
				}
				if err := <-result; !errors.Is(err, want) {
					t.Errorf("%v", err)
				}
				if _, err := w.client.Fetch(t.Context(), "p", w.d.request("r", h), nil); !errors.Is(err, ErrClosed) &&
					!errors.Is(err, ErrSuspended) {
					t.Errorf("%v", err)
				}
			})
		})
	}
}

// TestCancelInFlight: a fetch that is cancelled with blocks on the road returns when none of its
// slots is written any more, and has freed or committed them.
func TestCancelInFlight(t *testing.T) {
	hook := &beforeAcquire{}
	hooked := func(c *Config, cc *ClientConfig) {
		hook.Slots, c.Slots = c.Slots, hook
		cc.Streams, cc.BatchBytes, cc.WindowBytes = 1, 256<<10, 2<<20
	}
	inBubble(t, hooked, func(t *testing.T, w *frozen) {
		h := chain("a", 80)
		w.p.save(h)
		ctx, cancel := context.WithCancel(t.Context())
		held, release := make(chan struct{}), make(chan struct{})
		n := 0
		hook.do = func(*pool.Batch) {
			if n++; n == 3 {
				close(held)
				<-release
			}
		}
		var got Result
		var err error
		var over atomic.Bool
		go func() {
			got, err = fetchWith(ctx, t, w.client, "p", w.d.request("", h), nil)
			over.Store(true)
		}()
		<-held
		cancel()
		synctest.Wait()
		writing := func() bool { // it reserves the others, and gives them up
			b := w.d.batch(0, h, 0)
			w.d.Reserve(b)
			found := slices.Contains(b.Status, pool.InProgress)
			w.d.Commit(b.Slots, b.Epoch, slices.Repeat([]pool.Status{pool.Busy}, h.N))
			return found
		}
		if over.Load() || !writing() {
			t.Errorf("over %v: slots are reserved after the fetch has returned", over.Load())
		}
		close(release)
		synctest.Wait()
		if !over.Load() || writing() {
			t.Errorf("over %v, and slots are reserved", over.Load())
		}
		if !errors.Is(err, context.Canceled) || got.Blocks == 0 || got.Blocks == 160 {
			t.Errorf("%+v, %v", got, err)
		}
		if n := w.d.has(h); n != got.Blocks {
			t.Errorf("%d blocks are there, %d were stored", n, got.Blocks)
		}
	})
}

// TestDrainAfterOthers: a cancelled fetch waits for what it asked for while the peer sends what
// others asked for earlier, however long that takes, and costs these nothing. A peer that sends
// heartbeats alone is lost.
func TestDrainAfterOthers(t *testing.T) {
	for _, stops := range []bool{false, true} {
		t.Run(fmt.Sprint("it stops: ", stops), func(t *testing.T) {
			hook := &beforeAcquire{}
			hooked := func(c *Config, cc *ClientConfig) {
				hook.Slots, c.Slots = c.Slots, hook
				cc.Streams, cc.BatchBytes, cc.WindowBytes = 1, 256<<10, 4<<20
			}
			inBubble(t, hooked, func(t *testing.T, w *frozen) {
				ended, gets := make(chan struct{}), 0
				hook.do = func(*pool.Batch) {
					if gets++; stops && gets == 3 {
						<-ended
					}
					time.Sleep(DefaultTimeout / 16) // twice the least rate
				}
				one, two := chain("a", 60), chain("b", 20)
				w.p.save(one)
				w.p.save(two)
				var got Result
				var err error
				var all sync.WaitGroup
				all.Go(func() { got, err = fetchAll(t, w.client, "p", w.d.request("", one)) })
				synctest.Wait() // it has asked for as much as it may
				ctx, cancel := context.WithCancel(t.Context())
				start := time.Now()
				all.Go(func() {
					_, err := fetchWith(ctx, t, w.client, "p", w.d.request("", two), nil)
					if !errors.Is(err, context.Canceled) {
						t.Errorf("cancelled: %v", err)
					}
					if took := time.Since(start); stops && took > 7*DefaultTimeout || !stops && took < DefaultTimeout {
						t.Errorf("cancelled, and it took %v", took)
					}
				})
				synctest.Wait()
				cancel()
				if stops {
					time.Sleep(8 * DefaultTimeout)
					close(ended)
				}
				all.Wait()
				lost := w.client.Stats().Peers[0].Opened
				if stops && (!errors.Is(err, ErrLost) || lost != 1) ||
					!stops && (err != nil || got.Blocks != 120 || lost != 0) {
					t.Errorf("the other fetch: %+v, %v, lost %d times", got, err, lost)
				}
			})
		})
	}
}

// TestSharedPrefix: a fetch whose blocks another one is getting ends when they are there, and gets
// itself what fails for the other one; those that an engine saves are not waited for.
func TestSharedPrefix(t *testing.T) {
	h := chain("a", 40)
	hook := &beforeAcquire{}
	hooked := func(c *Config, cc *ClientConfig) {
		hook.Slots, c.Slots, cc.Streams = c.Slots, hook, 1
	}
	inBubble(t, hooked, func(t *testing.T, w *frozen) {
		w.p.save(h)
		held, release := make(chan struct{}), make(chan struct{})
		n := 0
		hook.do = func(b *pool.Batch) {
			switch n++; n { // of the GETs
			case 2: // the first fetch goes on to ask for everything
				close(held)
				<-release
				w.p.arena[w.p.offsets(h)[1]] ^= 1
			case 3:
				w.p.arena[w.p.offsets(h)[1]] ^= 1
			}
		}
		var one, two Result
		var errs [2]error
		var over atomic.Int32
		go func() {
			one, errs[0] = fetchAll(t, w.client, "p", w.d.request("", h))
			over.Add(1)
		}()
		<-held
		synctest.Wait()
		go func() {
			two, errs[1] = fetchAll(t, w.client, "p", w.d.request("", h))
			over.Add(1)
		}()
		synctest.Wait()
		if over.Load() != 0 {
			t.Error("the second fetch did not wait for the first")
		}
		close(release)
		time.Sleep(2 * lastDelay)
		if over.Load() != 2 || errors.Join(errs[:]...) != nil || one.Blocks != 79 || one.Failed[Corrupt] != 1 ||
			two.Blocks != 1 || two.Failed[Had] != 79 || w.d.has(h) != 80 {
			t.Errorf("%v, %+v, %+v, %v", over.Load(), one, two, errs)
		}
		b := w.d.batch(0, chain("engine", 3), 0)
		w.d.Reserve(b)
		w.p.save(chain("engine", 3))
		got, err := fetchAll(t, w.client, "p", w.d.request("", chain("engine", 3)))
		if err != nil || got.Failed[Had] != 3 || got.Blocks != 3 {
			t.Errorf("%+v, %v", got, err)
		}
		for i := range b.Status {
			b.Status[i] = pool.Busy
		}
		w.d.Commit(b.Slots, b.Epoch, b.Status)
	})
}

// largestSubscription is what the largest subscription holds, bytes.
const largestSubscription = subscriptionBytes + subscribeBytes + MaxName + 256*groupBytes + MaxHashes*(32+1)
