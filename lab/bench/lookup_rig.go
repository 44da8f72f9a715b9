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
func (b *lookupBench) register() error {
	r := lookupRegistration(b.ranks)
	var err error
	if b.scheduler, err = b.openSession(r, nil); err != nil {
		return fmt.Errorf("scheduler: %w", err)
	}
	for rank := range uint32(b.ranks) {
		if err := b.registerRank(*r, rank); err != nil {
			return fmt.Errorf("rank %d: %w", rank, err)
		}
	}
	return nil
}

func (b *lookupBench) registerRank(worker ipc.Register, rank uint32) error {
	fd, err := newMemory(lookupEngineBytes)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	worker.Role, worker.Rank, worker.Held, worker.LookupName = ipc.RoleWorker, rank, []uint32{rank}, ""
	worker.Regions, worker.Segments = 1, 1
	c, err := b.openSession(&worker, []any{
		&sentRegion{&ipc.Regions{Req: 1, List: []ipc.RegionDesc{{Kind: ipc.RegionFD, Size: lookupEngineBytes}}}, fd},
		&ipc.Segments{Req: 1, Shard: rank,
			List: []ipc.SegmentDesc{{Stride: lookupShardBytes, Bytes: lookupShardBytes}}},
	})
	if err != nil {
		return err
	}
	b.workers = append(b.workers, c)
	return nil
}

// sentRegion is a REGIONS with the descriptor of its only region.
type sentRegion struct {
	message *ipc.Regions
	fd      int
}

// openSession opens a session and registers it.
func (b *lookupBench) openSession(r *ipc.Register, parts []any) (*ipc.Conn, error) {
	c, w, err := ipc.DialSession(context.Background(), filepath.Join(b.dir, lookupSockets, ipc.SessionSocket),
		"kvbench bench", ipc.Version, ipc.Version)
	if err != nil {
		return nil, err
	}
	if r.Role == ipc.RoleScheduler {
		b.session = w.Session
	}
	if err := registerBench(c, r, parts); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

func registerBench(c *ipc.Conn, r *ipc.Register, parts []any) error {
	if err := c.Send(r); err != nil {
		return err
	}
	for _, p := range parts {
		var err error
		if region, ok := p.(*sentRegion); ok {
			err = c.Send(region.message, region.fd)
		} else {
			err = c.Send(p)
		}
		if err != nil {
			return err
		}
	}
	a, err := receive[*ipc.Registered](c)
	if err == nil && a.Status != ipc.RegDone {
		err = fmt.Errorf("refused: %s", a.Text)
	}
	return err
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
