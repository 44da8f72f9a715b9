package events

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/pool"
)

// Limits of a file of tokens.
const (
	maxQueued  = 64        // messages that wait to be written; more, and the file is made anew from the ledgers
	minRewrite = 64 << 20  // bytes: a smaller file is not made anew to save room
	maxCarried = 512 << 20 // bytes of spaces that are not open, which a new file takes over; the rest is lost
	restTimes  = 9         // times as long as making the file anew took, it is not made anew again
	failedRest = time.Minute
)

// keeper keeps the tokens that engines say in a file, for the next process: its blocks may outlive
// this one. A nil keeper keeps nothing.
type keeper struct {
	desk   *Desk
	path   string
	log    *zap.Logger
	queue  chan []byte   // records
	opened chan struct{} // cap 1: spaces may have been opened
	behind atomic.Bool   // the file is to be made anew
	bytes  atomic.Int64  // of the file
	errors atomic.Uint64

	mu        sync.Mutex
	forgotten map[pool.Fingerprint]bool // spaces whose records go when the file is made anew

	// The following is the goroutine's.
	file    *os.File // nil: not opened yet, or it cannot be
	limit   int64    // bytes: a larger file is made anew
	loaded  map[*space]bool
	resting <-chan time.Time // nil: the file may be made anew
	failing bool             // the last write failed
}

func newKeeper(d *Desk, path string, log *zap.Logger) *keeper {
	if path == "" {
		return nil
	}
	return &keeper{
		desk: d, path: path, log: log, queue: make(chan []byte, maxQueued), opened: make(chan struct{}, 1),
		limit: minRewrite, loaded: map[*space]bool{}, forgotten: map[pool.Fingerprint]bool{},
	}
}

// keep keeps what was said of a space's blocks. It does not wait.
func (k *keeper) keep(fp pool.Fingerprint, m *ipc.BlockTokens) {
	if k == nil {
		return
	}
	one, err := appendRecord(nil, fp, m)
	if err == nil {
		select {
		case k.queue <- one:
			return
		default:
		}
	}
	k.behind.Store(true)
}

// load has the tokens loaded of spaces that are open and were not, and lets go of those that were
// closed.
func (k *keeper) load() {
	if k != nil {
		select {
		case k.opened <- struct{}{}:
		default:
		}
	}
}

// renew has the file made anew, without what is not held any more.
func (k *keeper) renew() {
	if k != nil {
		k.behind.Store(true)
		k.load()
	}
}

// forget has the file made anew without what it has of a space that is not asked for.
func (k *keeper) forget(fp pool.Fingerprint) {
	k.mu.Lock()
	k.forgotten[fp] = true
	k.mu.Unlock()
	k.renew()
}

// work serves the file until the desk ends.
func (k *keeper) work() {
	for {
		ends := false
		select {
		case <-k.desk.stop:
			ends = true
		case <-k.opened:
			if err := k.loadNew(); err != nil {
				k.failed("reading", err)
				k.behind.Store(true) // which loads first
			}
		case one := <-k.queue:
			k.append(one)
		case <-k.resting:
			k.resting = nil
		}
		if ends {
			k.drain()
		}
		if (ends || k.resting == nil) && (k.behind.Load() || k.bytes.Load() > k.limit) {
			k.makeAnew()
		}
		if ends {
			if k.file != nil {
				k.failed("closing", k.file.Close())
			}
			return
		}
	}
}

// drain writes the records that are queued.
func (k *keeper) drain() {
	for range len(k.queue) {
		k.append(<-k.queue)
	}
}

// failed counts an error, and logs it if the last write did not fail.
func (k *keeper) failed(what string, err error) {
	if err == nil {
		return
	}
	k.errors.Add(1)
	if !k.failing {
		k.log.Warn("the file of KV events' tokens", zap.String("failed", what), zap.String("path", k.path),
			zap.Error(err))
	}
	k.failing = true
}

// open opens the file and drops what is not whole at its end.
func (k *keeper) open(flags int) (err error) {
	if k.file != nil {
		return nil
	}
	f, err := openOwn(k.path, flags)
	if err != nil {
		return err
	}
	if err := os.Remove(k.path + newSuffix); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errors.Join(err, f.Close()) // a process was killed while it made the file anew
	}
	end, err := readRecords(f, func(pool.Fingerprint, []byte, []byte) error { return nil })
	if errors.Is(err, errNoTokens) {
		if err = f.Truncate(0); err == nil {
			_, err = f.WriteAt([]byte(tokenMagic), 0)
		}
		end = int64(len(tokenMagic))
	} else if err == nil {
		err = f.Truncate(end)
	}
	if err != nil {
		return errors.Join(err, f.Close())
	}
	k.adopt(f, end)
	return nil
}

func (k *keeper) adopt(f *os.File, size int64) {
	k.file, k.limit = f, max(minRewrite, 2*size)
	k.bytes.Store(size)
}

// loadNew says to spaces that were opened what the file has of them.
func (k *keeper) loadNew() error {
	// A space that was closed, and one opened again since, may both be there.
	fresh, loaded := map[pool.Fingerprint][]*space{}, map[*space]bool{}
	for _, sp := range k.desk.all() {
		if loaded[sp] = true; !k.loaded[sp] {
			fresh[sp.print] = append(fresh[sp.print], sp)
		}
	}
	err := k.open(0)
	if err == nil && len(fresh) > 0 {
		_, err = readRecords(io.NewSectionReader(k.file, 0, k.bytes.Load()),
			func(fp pool.Fingerprint, _, frame []byte) error {
				if len(fresh[fp]) == 0 {
					return nil
				}
				if m, err := ipc.Decode(recordVersion, frame); err == nil {
					if said, ok := m.(*ipc.BlockTokens); ok {
						for _, sp := range fresh[fp] {
							sp.learn(said)
						}
					}
				}
				return nil
			})
	}
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		k.loaded = loaded
		return nil
	}
	return err
}

// append writes a record. What cannot be written is written when the file is made anew.
func (k *keeper) append(one []byte) {
	err := k.open(os.O_CREATE)
	if err == nil {
		if _, err = k.file.WriteAt(one, k.bytes.Load()); err == nil {
			k.bytes.Add(int64(len(one)))
			k.failing = false
			return
		}
	}
	k.failed("writing", err)
	k.behind.Store(true)
}
