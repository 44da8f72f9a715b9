package peer

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvagent/kvagent/pool"
)

// drip is a connection from which some bytes come every second, once there are so many.
type drip struct {
	net.Conn
	bytes atomic.Int64
	ended chan struct{}
	once  sync.Once
}

func newDrip(c net.Conn) *drip { return &drip{Conn: c, ended: make(chan struct{})} }

func (d *drip) Read(p []byte) (int, error) {
	if n := d.bytes.Load(); n > 0 {
		select {
		case <-time.After(time.Second):
		case <-d.ended:
		}
		p = p[:min(int64(len(p)), n)]
	}
	return d.Conn.Read(p)
}

func (d *drip) Close() error {
	d.once.Do(func() { close(d.ended) })
	return d.Conn.Close()
}

// TestDrippingServer: a peer that sends a byte, or some, every second, well within the timeout, is
// lost after the time that what it was asked for may take, and nobody waits for it who closes.
func TestDrippingServer(t *testing.T) {
	for end, bytes := range map[string]int64{
		"a byte": 1, "some": leastRate / 16, "cancelled": leastRate / 16, "closed": leastRate / 16,
	} {
		t.Run(end, func(t *testing.T) {
			var drips []*drip
			var asked *pipes
			dial := func(c *Config, cc *ClientConfig) {
				c.Timeout = MaxTimeout
				cc.Dial = func(ctx context.Context, addr string) (net.Conn, error) {
					c, err := asked.dial(ctx, addr)
					if err != nil {
						return nil, err
					}
					d := newDrip(c)
					drips = append(drips, d)
					return d, nil
				}
			}
			inBubble(t, dial, func(t *testing.T, w *frozen) {
				asked = w.net.pipes
				h := chain("a", 41)
				w.p.save(h.Slice(0, 40)) // no END waits until BLOCKS is written: a bubble's clock stops for a mutex
				w.p.set("r", Open, 0)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var began time.Time
				var took time.Duration
				var err error
				limit, want := askTimeouts*DefaultTimeout+atLeastRate(w.client.cfg.WindowBytes), ErrLost
				var all sync.WaitGroup
				all.Go(func() {
					_, err = fetchWith(ctx, t, w.client, "p", w.d.request("r", h), func(int, int64) {
						if !began.IsZero() {
							return
						}
						began = time.Now()
						for _, d := range drips {
							d.bytes.Store(bytes)
							time.AfterFunc(2*limit, func() { d.bytes.Store(0) })
						}
					})
					took = time.Since(began)
				})
				synctest.Wait()
				switch end {
				case "cancelled":
					cancel()
					want = context.Canceled
				case "closed":
					check(t, w.client.Close())
					limit, want = 0, ErrClosed
				}
				all.Wait()
				if !errors.Is(err, want) || took > limit {
					t.Errorf("a peer that drips is waited for: %v after %v, at most %v", err, took, limit)
				}
				w.d.nothingLeft()
			})
		})
	}
}

// TestDrippingClient: a client that takes a little all the time, well within the timeout, is lost
// after the time that its blocks may take, so that they are not pinned longer; and the server
// closes without it. So is one that sends a SUBSCRIBE like that.
func TestDrippingClient(t *testing.T) {
	for name, c := range map[string]struct {
		bytes  int64 // that it takes every second
		closes bool  // the server does
	}{
		"a byte":            {1, false},
		"less than it must": {leastRate / 3, false},
		"closed":            {leastRate / 3, true},
	} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, nil, func(t *testing.T, w *frozen) {
				w.p.saveGroup(0, chain("a", MaxBatch), 1)
				raw, err := w.net.dial(t.Context(), "p")
				check(t, err)
				defer raw.Close()
				auth := testKey(t, 1)
				client, err := dialled(t.Context(), raw, "p", &auth, MaxTimeout)
				check(t, err)
				ended := make(chan struct{})
				defer close(ended)
				go client.heartbeats(ended)
				m := get{space: w.p.spec.Fingerprint, length: 64 << 10, hashes: chain("a", MaxBatch)}
				check(t, client.send(kindGet, 1, m.encode(nil)))
				start := time.Now()
				limit := DefaultTimeout + atLeastRate(MaxBatch*(64<<10+macBytes)) + 2*time.Second // to see the end
				if c.closes {
					time.Sleep(2 * time.Second)
					before := time.Now()
					check(t, w.server.Close())
					if took := time.Since(before); took > 0 {
						t.Errorf("it closed after %v", took)
					}
				}
				for err == nil {
					time.Sleep(time.Second)
					_, err = io.CopyN(io.Discard, raw, c.bytes)
				}
				if took := time.Since(start); took > limit {
					t.Errorf("a client that drips is waited for: %v, at most %v", took, limit)
				}
				synctest.Wait()
				if st := w.server.Stats(); st.Connections != 0 {
					t.Errorf("%+v", st)
				}
				w.p.nothingLeft()
			})
		})
	}
	t.Run("a SUBSCRIBE", func(t *testing.T) {
		inBubble(t, nil, func(t *testing.T, w *frozen) {
			raw, err := w.net.dial(t.Context(), "p")
			check(t, err)
			defer raw.Close()
			auth := testKey(t, 1)
			client, err := dialled(t.Context(), raw, "p", &auth, MaxTimeout)
			check(t, err)
			m := subscribe{space: pool.Fingerprint{1}, groups: []subscribeGroup{{0, chain("a", 1000)}}}
			client.seal(kindSubscribe, 1, m.encode(), 0)
			go func() {
				for b := make([]byte, 1<<10); err == nil; { // what it says to this
					_, err = raw.Read(b)
				}
			}()
			start := time.Now()
			for _, b := range client.frame {
				if _, err := raw.Write([]byte{b}); err != nil {
					break
				}
				time.Sleep(time.Second)
			}
			if took := time.Since(start); took > 2*headerBytes*time.Second {
				t.Errorf("a client that drips is waited for: %v", took)
			}
		})
	})
}
