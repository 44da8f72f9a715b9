// Package disk is a store on the disks of the node. Each directory has a log of append-only
// segments, written in large aligned pieces past the page cache; the index is in memory. It is a
// cache: it may drop any block, acknowledges nothing as durable, and never returns a byte that does
// not verify. docs/DISK.md describes the bytes on the disk.
//
//	Put ──▶ queue ──▶ writers: a batch ──▶ place ──▶ copy, checksum ──▶ segment ──▶ index
//	Get ──▶ index ──▶ runs of neighbours ──▶ readers ──▶ compare key, length, checksum ──▶ caller
//	keeper: prepares the next segment, writes footers, evicts the oldest, reopens a lost directory
//
// Writers and readers have memory of their own, so a disk that hangs holds no caller and none of a
// caller's memory. A key belongs to one directory, by its hash, so logs are never compared. In a
// log a later record of a block replaces earlier ones. Segments are evicted strictly oldest first.
package disk

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"
	"sync/atomic"

	"github.com/kvagent/kvagent/pool"
)

// ErrLocked is the error of Open if another store has one of the directories.
var ErrLocked = errors.New("another store has this directory")

// Store implements pool.Store. All methods may be called concurrently.
type Store struct {
	o       Options
	dirs    []*dir
	index   index
	handles handles
	seeds   [2]maphash.Seed // of tags; they live as long as the process
	count   [counters]atomic.Uint64
	notes   notes

	background context.Context //nolint:containedctx // ends the store's own goroutines, and calls that wait, at Close
	end        context.CancelFunc
	work       sync.WaitGroup // writers and reads
	keepers    sync.WaitGroup // they need the writers, and so end first

	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup
	once   sync.Once
	err    error // of Close
}

// Open opens the directories, recovers what is stored in them, and starts the store. It returns an
// error for an option out of range and for a directory that another store has. A directory that
// cannot be used now is no error: its state is not StateOK, and it is retried.
func Open(o Options) (*Store, error) {
	o.setDefaults()
	if err := o.check(); err != nil {
		return nil, err
	}
	s := &Store{
		o: o, seeds: [2]maphash.Seed{maphash.MakeSeed(), maphash.MakeSeed()},
	}
	s.background, s.end = context.WithCancel(context.Background())
	for i := range o.Dirs {
		d, err := newDir(s, i)
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		s.dirs = append(s.dirs, d)
	}
	if err := s.openDirs(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	for _, d := range s.dirs {
		d.start()
	}
	return s, nil
}

// openDirs recovers all directories concurrently.
func (s *Store) openDirs() error {
	errs := make([]error, len(s.dirs))
	var opened sync.WaitGroup
	for i, d := range s.dirs {
		opened.Go(func() {
			err := d.open()
			if errors.Is(err, ErrLocked) || errors.Is(err, errFormat) {
				errs[i] = err
			}
		})
	}
	opened.Wait()
	return errors.Join(errs...)
}

// Close writes what was accepted, closes the segments with their footers, and waits for all calls
// and goroutines. Calls that wait for room end with pool.ErrClosed.
func (s *Store) Close() error {
	s.once.Do(func() {
		s.mu.Lock()
		s.closed = true
		s.mu.Unlock()
		s.end()
		s.calls.Wait()
		s.keepers.Wait()
		for _, d := range s.dirs {
			d.mu.Lock()
			d.stopping = true
			d.work.Broadcast()
			d.mu.Unlock()
		}
		s.work.Wait()
		for _, d := range s.dirs {
			s.err = errors.Join(s.err, d.shut())
		}
		s.err = errors.Join(s.err, s.index.close())
	})
	return s.err
}

// enter registers a call, so that Close can wait for it: it ends by calls.Done.
func (s *Store) enter(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("disk: %w", pool.ErrClosed)
	}
	s.calls.Add(1)
	return nil
}

func valid(k *pool.Key) bool { return k.Hash.Len >= 1 && k.Hash.Len <= pool.MaxHashLen }

// choose returns the directory of a key: the one with the highest score of both (rendezvous
// hashing). So adding or losing a directory moves only its own share of the keys. The names of the
// directories matter, their order does not.
func (s *Store) choose(k *pool.Key) (best *dir) {
	if len(s.dirs) == 1 {
		return s.dirs[0]
	}
	b := keyBytes(k)
	h, score := uint64(pool.Sum(0, b[:])), uint64(0)
	for _, d := range s.dirs {
		if v := mix(h ^ d.salt); best == nil || v > score {
			best, score = d, v
		}
	}
	return best
}

const keySize = 16 + 3 + pool.MaxHashLen

func keyBytes(k *pool.Key) (b [keySize]byte) {
	copy(b[:16], k.Space[:])
	b[16], b[17], b[18] = k.Group, k.Shard, k.Hash.Len
	copy(b[19:], k.Hash.Bytes[:])
	return b
}

// mix spreads every bit over all (the finaliser of SplitMix64).
func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
