package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/ipc/socketdir"
	"github.com/kvagent/kvagent/mockengine"
	"github.com/kvagent/kvagent/pool"
)

const (
	lookupPatience = 5 * time.Second
	lookupDeadline = 1_000_000 // microseconds: long enough for every answer of a busy machine
	lookupWarmUp   = 50        // questions of each client that do not count
)

// measure asks that many rounds.
func (b *lookupBench) measure(n, rounds int) (lookupRow, error) {
	r := lookupRow{Hashes: n, Ranks: b.ranks}
	took := make([]float64, 0, lookupWarmUp+rounds)
	for range lookupWarmUp + rounds {
		if err := b.asker.draw(n); err != nil {
			return r, err
		}
		us, err := b.asker.ask()
		if err != nil {
			return r, err
		}
		took = append(took, us)
	}
	took = took[lookupWarmUp:]
	slices.Sort(took)
	r.P50us, r.P99us = took[len(took)/2], took[len(took)*99/100]
	return r, nil
}

// asker is one client. It reserves what it finds, and waits until the agent is idle before it asks,
// if it has the engine's scheduler for itself.
type asker struct {
	bench    *lookupBench
	alone    bool
	random   *rand.Rand
	agent    *mockengine.LookupClient
	question question
}

// question is a request as it is sent; its memory is used again.
type question struct {
	request ipc.LookupRequest
	frames  ipc.Frames
	want    uint32 // tokens, all of them hits
	blob    []byte
}

// draw makes a question for n hashes from anywhere in a stored chain.
func (a *asker) draw(n int) error {
	q := &a.question
	chain := benchChain(q.blob[:0], a.random.IntN(a.bench.chains), lookupChain)
	q.blob = chain.Blob
	from := a.random.IntN(lookupChain-n+1) * pool.MaxHashLen
	q.want = uint32(n * lookupBlockTokens)
	q.request = ipc.LookupRequest{Tokens: uint64(q.want) + 1, HashLen: pool.MaxHashLen,
		Hashes: q.blob[from : from+n*pool.MaxHashLen], Session: a.bench.session, DeadlineUS: lookupDeadline}
	if a.alone { // the engine's one scheduler releases it between questions
		q.request.Want = ipc.WantReserve
	}
	q.frames.Reset()
	return ipc.AppendRequest(&q.frames, &q.request)
}

// ask asks what was drawn, checks that everything is found, and releases leases outside of the
// measured time, which it returns in microseconds.
func (a *asker) ask() (us float64, err error) {
	q := &a.question
	if err := a.settle(0); err != nil {
		return 0, err
	}
	start := time.Now()
	answer, err := a.agent.Exchange(&q.frames, lookupPatience)
	took := time.Since(start)
	if err != nil {
		return 0, err
	}
	r, err := ipc.DecodeReply(answer)
	if err != nil {
		return 0, err
	}
	if r.Status != ipc.LookupHit || r.Tokens != q.want {
		return 0, fmt.Errorf("status %d, %d tokens, want %d", r.Status, r.Tokens, q.want)
	}
	return float64(took.Nanoseconds()) / 1e3, a.settle(r.Lease)
}

// settle releases a lease, if there is one, and waits until the agent has done it and is idle.
func (a *asker) settle(lease uint64) error {
	if !a.alone {
		return nil
	}
	c := a.bench.scheduler
	if lease != 0 {
		if err := c.Send(&ipc.Release{Leases: []uint64{lease}}); err != nil {
			return err
		}
	}
	if err := c.Send(&ipc.Ping{}); err != nil {
		return err
	}
	_, err := receive[*ipc.Pong](c)
	return err
}

// Sizes of the measurement.
const (
	lookupChain       = 2048 // blocks of a stored chain
	lookupBlockTokens = 16
	lookupShardBytes  = 1024
	lookupEngineBytes = 1 << 20 // of each rank's memory, and of an arena that no copy touches
	lookupName        = "bench"
)

// lookupBench is an agent with a filled pool, in a process of its own, and one engine of some ranks
// in this one.
type lookupBench struct {
	ranks, chains int
	dir           string
	server        *childProcess
	scheduler     *ipc.Conn
	session       uint64
	workers       []*ipc.Conn
	asker         *asker
}

func newLookupBench(s *lookupSettings, ranks int) (*lookupBench, error) {
	b := &lookupBench{ranks: ranks, chains: (s.blocks + lookupChain - 1) / lookupChain}
	if err := b.open(s); err != nil {
		return nil, errors.Join(err, b.close())
	}
	return b, nil
}

func (b *lookupBench) open(s *lookupSettings) (err error) {
	if b.dir, err = os.MkdirTemp("", "kvagent"); err != nil {
		return err
	}
	if b.server, err = startChildProcess("bench", "lookup", "agent", b.dir, strconv.Itoa(b.chains),
		strconv.Itoa(b.ranks), s.agent); err != nil {
		return err
	}
	if err := b.register(); err != nil {
		return err
	}
	b.asker = b.newAsker(0, true)
	return nil
}

// register registers the engine: its scheduler, which opens the look-up socket, and all its ranks.
func (b *lookupBench) register() (err error) {
	r := lookupRegistration(b.ranks)
	if b.scheduler, b.session, err = dialBench(b.dir, r, 0, 0); err != nil {
		return fmt.Errorf("scheduler: %w", err)
	}
	for rank := range uint32(b.ranks) {
		worker := *r
		worker.Role, worker.Rank, worker.Held, worker.LookupName = ipc.RoleWorker, rank, []uint32{rank}, ""
		c, _, err := dialBench(b.dir, &worker, lookupEngineBytes, lookupShardBytes)
		if err != nil {
			return fmt.Errorf("rank %d: %w", rank, err)
		}
		b.workers = append(b.workers, c)
	}
	return nil
}

// dialBench opens a session with the agent of a measurement and registers it. A worker has memory
// of that many bytes, in blocks.
func dialBench(dir string, r *ipc.Register, memory, block int64) (c *ipc.Conn, session uint64, err error) {
	c, w, err := mockengine.DialSession(context.Background(), filepath.Join(dir, lookupSockets, socketdir.Session),
		"kvbench bench")
	if err != nil {
		return nil, 0, err
	}
	if memory > 0 {
		r.Regions, r.Segments = 1, 1
	}
	if err = c.Send(r); err == nil && memory > 0 {
		err = sendMemory(c, r.Rank, memory, block)
	}
	var a *ipc.Registered
	if err == nil {
		a, err = receive[*ipc.Registered](c)
	}
	if err == nil && a.Status != ipc.RegDone {
		err = fmt.Errorf("refused: %s", a.Text)
	}
	if err != nil {
		return nil, 0, errors.Join(err, c.Close())
	}
	return c, w.Session, nil
}

func sendMemory(c *ipc.Conn, rank uint32, memory, block int64) error {
	fd, err := newMemory(memory)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	regions := &ipc.Regions{Req: 1, List: []ipc.RegionDesc{{Kind: ipc.RegionFD, Size: uint64(memory)}}}
	if err := c.Send(regions, fd); err != nil {
		return err
	}
	return c.Send(&ipc.Segments{Req: 1, Shard: rank,
		List: []ipc.SegmentDesc{{Stride: uint64(block), Bytes: uint32(block)}}})
}

func (b *lookupBench) newAsker(seed uint64, alone bool) *asker {
	return &asker{bench: b, alone: alone, random: rand.New(rand.NewPCG(1, 2+seed)),
		agent: mockengine.DialLookup(filepath.Join(b.dir, lookupSockets, lookupName))}
}

func (b *lookupBench) close() (err error) {
	if b.asker != nil {
		err = b.asker.agent.Close()
	}
	for _, c := range append(b.workers, b.scheduler) {
		if c != nil {
			err = errors.Join(err, c.Close())
		}
	}
	if b.server != nil {
		err = errors.Join(err, b.server.close())
	}
	return errors.Join(err, os.RemoveAll(b.dir))
}

// receive waits for a message of one type, and skips others.
func receive[T any](c *ipc.Conn) (want T, err error) {
	for {
		m, _, err := c.Recv()
		if err != nil {
			return want, err
		}
		if want, ok := m.(T); ok {
			return want, nil
		}
	}
}
