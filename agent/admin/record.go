package admin

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/kvagent/kvagent/agent/history"
	"github.com/kvagent/kvagent/pool"
)

// stalledReader is how long the reader of /record may read nothing before it is disconnected.
const stalledReader = time.Minute

// RecordLine is a line of /record: a prompt, in the format of traces, or the number of prompts that
// were dropped.
type RecordLine struct {
	Timestamp    float64  `json:"timestamp"`     // ms since the recording began
	InputLength  uint32   `json:"input_length"`  // tokens of whole blocks
	OutputLength uint32   `json:"output_length"` // 0: the agent does not know it
	HashIDs      []uint64 `json:"hash_ids"`      // salted, 63 bits each
	Dropped      uint64   `json:"dropped,omitempty"`
}

// recordFeed writes what a recording passes on.
type recordFeed struct {
	begin time.Time
	salt  [32]byte // forgotten at the end: nobody can find out whether a known prompt is in it
	out   *json.Encoder
	rc    *http.ResponseController
	buf   []byte
}

// record serves GET /record: a line for each prompt that engines ask for, until the reader leaves.
func (s *Server) record(rw http.ResponseWriter, r *http.Request) {
	world := s.view.source.Explain
	if world == nil {
		http.Error(rw, "nothing is remembered", http.StatusNotFound)
		return
	}
	recording, err := world.History.Record()
	if errors.Is(err, history.ErrTooMany) {
		http.Error(rw, err.Error(), http.StatusTooManyRequests)
		return
	}
	defer recording.Close()
	f := &recordFeed{begin: time.Now(), out: json.NewEncoder(rw), rc: http.NewResponseController(rw)}
	_, _ = rand.Read(f.salt[:])                               // it never fails
	if err := f.rc.SetReadDeadline(time.Time{}); err != nil { // else it ends with the server's limit
		http.Error(rw, err.Error(), http.StatusInternalServerError)
		return
	}
	rw.Header().Set("Content-Type", "application/x-ndjson")
	var list []history.Prompt
	var dropped uint64
	for ; err == nil; list, dropped, err = recording.Next(r.Context()) {
		if f.write(list, dropped) != nil {
			return // the reader has gone, or stalled
		}
	}
}

// write writes lines, and waits until the reader has taken them in.
func (f *recordFeed) write(list []history.Prompt, dropped uint64) error {
	if err := f.rc.SetWriteDeadline(time.Now().Add(stalledReader)); err != nil {
		return err
	}
	if dropped > 0 {
		if err := f.out.Encode(&RecordLine{Dropped: dropped}); err != nil {
			return err
		}
	}
	for i := range list {
		p := &list[i]
		ms := float64(p.At.Sub(f.begin).Microseconds()) / 1000
		line := RecordLine{Timestamp: max(ms, 0), InputLength: p.Tokens, HashIDs: make([]uint64, p.Hashes.N)}
		for b := range line.HashIDs {
			line.HashIDs[b] = f.id(p.Space, p.Hashes.At(b))
		}
		if err := f.out.Encode(&line); err != nil {
			return err
		}
	}
	return f.rc.Flush()
}

// id returns the number of a block in the recording: equal for equal blocks of one space.
func (f *recordFeed) id(space pool.Fingerprint, hash []byte) uint64 {
	f.buf = append(append(append(f.buf[:0], f.salt[:]...), space[:]...), hash...)
	sum := sha256.Sum256(f.buf)
	return binary.BigEndian.Uint64(sum[:]) >> 1
}
