package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/kvagent/kvagent/ipc"
)

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
	saver         *lookupSaver // nil: no engine saves
	askers        []*asker
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
	kind := lookupVirtual
	if s.saves {
		kind = lookupReal
	}
	if b.server, err = startChildProcess("bench", "lookup", "agent", b.dir, strconv.Itoa(b.chains),
		strconv.Itoa(b.ranks), kind); err != nil {
		return err
	}
	if err := b.register(); err != nil {
		return err
	}
	for i := range s.clients {
		b.askers = append(b.askers, b.newAsker(uint64(i)))
	}
	if s.saves {
		b.saver, err = startSaver(b.dir)
	}
	return err
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
	c, w, err := ipc.DialSession(context.Background(), filepath.Join(dir, lookupSockets, ipc.SessionSocket),
		"kvbench bench", ipc.Version, ipc.Version)
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

func (b *lookupBench) newAsker(seed uint64) *asker {
	return &asker{bench: b, random: rand.New(rand.NewPCG(1, 2+seed)),
		agent: ipc.DialLookup(filepath.Join(b.dir, lookupSockets, lookupName))}
}

func (b *lookupBench) close() (err error) {
	if b.saver != nil {
		err = b.saver.close()
	}
	for _, a := range b.askers {
		err = errors.Join(err, a.agent.Close())
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
