package peer

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/dram"
	"github.com/kvagent/kvagent/pool/pooltest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// agent is one side: a pool with an open space, and its transfers.
type agent struct {
	*dram.Pool
	t     testing.TB
	spec  pool.Spec
	space pool.SpaceID
	arena []byte

	mu        sync.Mutex
	transfers map[string]Transfer
	changed   chan struct{}
	delivered []string
}

// specOf returns a space of two groups; the second has blocks half as large.
func specOf(shards int, bytes uint32) pool.Spec {
	s := pool.Spec{Identity: []byte("model"), Shards: shards}
	sum := sha256.Sum256(s.Identity)
	copy(s.Fingerprint[:], sum[:])
	for _, n := range []uint32{bytes, bytes / 2} {
		g := pool.Group{BlockTokens: 16}
		for k := range shards {
			g.ShardBytes = append(g.ShardBytes, n+uint32(k))
		}
		s.Groups = append(s.Groups, g)
	}
	return s
}

func newAgent(t testing.TB, bytes int64, spec pool.Spec) *agent {
	t.Helper()
	p, err := dram.Open(dram.Options{Bytes: bytes, HugePages: dram.Off})
	check(t, err)
	a := &agent{Pool: p, t: t, spec: spec, transfers: map[string]Transfer{}, changed: make(chan struct{})}
	a.arena, _ = p.Arena()
	a.space, err = p.OpenSpace(spec)
	check(t, err)
	t.Cleanup(func() {
		a.nothingLeft()
		_, err := a.ResetSpace(a.space)
		check(t, err)
		a.Sweep()
		if s := a.Stats(); s.Used != 0 {
			t.Errorf("%d bytes are still pinned or reserved", s.Used)
		}
		check(t, p.Close())
	})
	return a
}

// nothingLeft checks that nothing is pinned or reserved.
func (a *agent) nothingLeft() {
	a.t.Helper()
	// A block that was sent is unpinned after its last byte, which the other side may have by then.
	pooltest.Until(a.t, "the end of the pins", func() bool { return a.Stats().PinnedEntries == 0 })
	if s := a.Stats(); s.Pinned != 0 || s.PinnedEntries != 0 || s.Partial != 0 {
		a.t.Errorf("left: %d bytes and %d entries pinned, %d partial", s.Pinned, s.PinnedEntries, s.Partial)
	}
}

// source is a Source.
func (a *agent) source(_ pool.SpaceID, name string) (Transfer, <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.transfers[name], a.changed
}

func (a *agent) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
	close(a.changed)
	a.changed = make(chan struct{})
}

// set changes a transfer; Unknown removes it.
func (a *agent) set(name string, s State, tokens uint32) {
	a.change(func() {
		if a.transfers[name] = (Transfer{s, tokens}); s == Unknown {
			delete(a.transfers, name)
		}
	})
}

func (a *agent) resolve(f pool.Fingerprint) (pool.SpaceID, uint32, bool) {
	return a.space, a.Epoch(a.space), f == a.spec.Fingerprint
}

// chain is n hashes that belong to a name; the first m of a longer one are the same.
func chain(name string, n int) pool.Hashes {
	var blob []byte
	for i := range n {
		sum := sha256.Sum256(binary.LittleEndian.AppendUint32([]byte(name), uint32(i)))
		blob = append(blob, sum[:]...)
	}
	return pool.Chain(blob, 32)
}

// content is what is stored under a key.
func content(k *pool.Key, p []byte) {
	seed := k.Seed(uint32(len(p)))
	for i := range p {
		seed = seed*1664525 + 1013904223
		p[i] = byte(seed >> 24)
	}
}

func (a *agent) batch(group uint8, h pool.Hashes, shard int) *pool.Batch {
	return &pool.Batch{
		Space: a.space, Group: group, Shard: uint8(shard), Epoch: a.Epoch(a.space), Hashes: h,
		Status: make([]pool.Status, h.N), Slots: make([]pool.Slot, h.N),
	}
}

func (a *agent) key(b *pool.Batch, i int) pool.Key {
	return pool.Key{Space: a.spec.Fingerprint, Group: b.Group, Shard: b.Shard, Hash: pool.MakeHash(b.Hashes.At(i))}
}

// save stores all shards of a chain in both groups, and wakes subscriptions.
func (a *agent) save(h pool.Hashes) {
	a.t.Helper()
	for group := range a.spec.Groups {
		a.saveGroup(uint8(group), h, a.spec.Shards)
	}
	a.change(func() {})
}

// saveGroup stores the first shards of a chain.
func (a *agent) saveGroup(group uint8, h pool.Hashes, shards int) {
	a.t.Helper()
	for shard := range shards {
		b := a.batch(group, h, shard)
		a.Reserve(b)
		for i := range b.Status {
			if b.Status[i] == pool.OK {
				key, s := a.key(b, i), &b.Slots[i]
				p := a.arena[s.Off : s.Off+int64(s.Len)]
				content(&key, p)
				s.Sum = pool.Sum(key.Seed(s.Len), p)
			}
		}
		a.Commit(b.Slots, b.Epoch, b.Status)
	}
}

// has compares every byte of what is stored of a chain in both groups, and returns how many blocks
// there are.
func (a *agent) has(h pool.Hashes) (n int) {
	a.t.Helper()
	for group := range a.spec.Groups {
		present := make([]bool, h.N)
		a.Exists(a.space, uint8(group), h, present)
		for i, is := range present {
			if is && a.whole(uint8(group), h.Slice(i, i+1)) {
				n++
			}
		}
	}
	return n
}

func (a *agent) whole(group uint8, h pool.Hashes) bool {
	a.t.Helper()
	for shard := range a.spec.Shards {
		b := a.batch(group, h, shard)
		a.Acquire(b)
		if b.Status[0] != pool.OK {
			return false // evicted meanwhile
		}
		key, s := a.key(b, 0), b.Slots[0]
		want := make([]byte, s.Len)
		content(&key, want)
		if !bytes.Equal(a.arena[s.Off:s.Off+int64(s.Len)], want) {
			a.t.Errorf("WRONG BYTES in group %d, shard %d", group, shard)
		}
		if s.Sum != pool.Sum(key.Seed(s.Len), want) {
			a.t.Errorf("wrong checksum in group %d, shard %d", group, shard)
		}
		a.Release(b.Slots, b.Status)
	}
	return true
}

// request asks for a chain in both groups.
func (a *agent) request(name string, h pool.Hashes) Request {
	return Request{
		Name: name, Space: a.spec.Fingerprint, ID: a.space, Epoch: a.Epoch(a.space), Shards: a.spec.Shards,
		Groups: []Group{{Group: 0, Hashes: h}, {Group: 1, Hashes: h}}, Wait: time.Minute,
	}
}

func testKey(t testing.TB, fill byte) Auth {
	t.Helper()
	a, err := Key(bytes.Repeat([]byte{fill}, MinKey))
	check(t, err)
	return a
}

// config is a server's over an agent's pool.
func (a *agent) config() Config {
	return Config{
		Index: a, Slots: a, Arena: a.arena, Resolve: a.resolve, Transfers: a.source, Auth: testKey(a.t, 1),
		Delivered: func(_ pool.SpaceID, name string) { a.change(func() { a.delivered = append(a.delivered, name) }) },
		Log:       func(peer, what string, err error) { a.t.Logf("server: %s: %s: %v", peer, what, err) },
	}
}

func (a *agent) clientConfig() ClientConfig {
	return ClientConfig{
		Slots: a, Arena: a.arena, Auth: testKey(a.t, 1),
		Log: func(peer, what string, err error) { a.t.Logf("client: %s: %s: %v", peer, what, err) },
	}
}

// serve starts a server on loopback, and stops it when the test ends.
func serve(t testing.TB, cfg Config) *Server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	return serveOn(t, l, cfg)
}

func serveOn(t testing.TB, l net.Listener, cfg Config) *Server {
	t.Helper()
	s, err := Serve(l, cfg)
	check(t, err)
	t.Cleanup(func() {
		if err := s.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if st := s.Stats(); st.Connections != 0 || st.Pending != 0 || st.Subscriptions != 0 || st.Held != 0 {
			t.Errorf("left in the server: %+v", st)
		}
	})
	return s
}

func newClient(t testing.TB, cfg ClientConfig) *Client {
	t.Helper()
	c, err := NewClient(cfg)
	check(t, err)
	t.Cleanup(func() {
		if err := c.Close(); err != nil && !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if st := c.Stats(); st.Fetches != 0 {
			t.Errorf("left in the client: %+v", st)
		}
	})
	return c
}

// fetch fetches, and checks that the result counts every block once.
func fetchAll(t testing.TB, c *Client, addr string, r Request) (Result, error) {
	t.Helper()
	return fetchWith(context.Background(), t, c, addr, r, nil)
}

func fetchWith(
	ctx context.Context, t testing.TB, c *Client, addr string, r Request, stored func(int, int64),
) (Result, error) {
	t.Helper()
	seen := [2]int64{}
	res, err := c.Fetch(ctx, addr, r, func(blocks int, bytes int64) {
		seen[0], seen[1] = seen[0]+int64(blocks), seen[1]+bytes
		if stored != nil {
			stored(blocks, bytes)
		}
	})
	total, counted := 0, res.Blocks
	for i := range r.Groups {
		total += r.Groups[i].Hashes.N
	}
	for _, n := range res.Failed {
		counted += n
	}
	if counted != total {
		t.Errorf("%d of %d blocks counted: %+v", counted, total, res)
	}
	if seen[0] != int64(res.Blocks) || seen[1] != res.Bytes {
		t.Errorf("reported %v as stored, the result is %+v", seen, res)
	}
	return res, err
}

// pipes is a listener and a dialer over net.Pipe, which a fake clock knows.
type pipes struct {
	to     chan net.Conn
	ended  chan struct{}
	once   sync.Once
	mu     sync.Mutex
	dialed []net.Conn // the clients' ends
}

func newPipes() *pipes { return &pipes{to: make(chan net.Conn), ended: make(chan struct{})} }

func (p *pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.to:
		return c, nil
	case <-p.ended:
		return nil, net.ErrClosed
	}
}

func (p *pipes) Close() error {
	p.once.Do(func() { close(p.ended) })
	return nil
}

func (p *pipes) Addr() net.Addr { return pipeAddr{} }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "pipe" }

func (p *pipes) dial(ctx context.Context, _ string) (net.Conn, error) {
	client, server := net.Pipe()
	select {
	case p.to <- server:
		p.mu.Lock()
		defer p.mu.Unlock()
		p.dialed = append(p.dialed, client)
		return client, nil
	case <-p.ended:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}
