package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"

	"github.com/minio/minio-go/v7"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

// Limits of answers.
const (
	headerBytes   = 16 << 10
	documentBytes = 16 << 10 // an error, a location, credentials
)

// bounded is a transport whose answers end with an error where they are longer than what was asked
// for, before the library reads that.
type bounded struct{ http.RoundTripper }

// newTransport returns a transport for answers of at most headerBytes and a body, which bounded is
// to bound. The service decides nothing about the body's encoding.
func newTransport(o *Options) *http.Transport {
	return &http.Transport{
		DialContext:         (&net.Dialer{Timeout: o.DialTimeout}).DialContext,
		TLSHandshakeTimeout: o.DialTimeout, Proxy: http.ProxyFromEnvironment,
		DisableCompression: true, MaxResponseHeaderBytes: headerBytes,
	}
}

// RoundTrip implements http.RoundTripper.
func (b bounded) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := b.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	a := &answer{ReadCloser: resp.Body, left: documentBytes}
	if resp.StatusCode < http.StatusMultipleChoices && r.Method == http.MethodGet {
		var from, to int64
		if n, _ := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); n == 2 {
			a.left = to - from + 1
		}
	}
	resp.Body = a
	return resp, nil
}

// answer is the body of an answer.
type answer struct {
	io.ReadCloser
	left int64 // bytes; negative: there were more
}

func (a *answer) Read(p []byte) (n int, err error) {
	if a.left >= 0 {
		n, err = a.ReadCloser.Read(p[:min(int64(len(p)), a.left+1)])
		a.left -= int64(n)
	}
	if a.left < 0 {
		return 0, fmt.Errorf("s3: %w: it is longer", remote.ErrAnswer)
	}
	return n, err
}

// errLength is the error for an object of another length than asked for.
var errLength = errors.New("s3: another length")

// Get implements pool.Store. Missing is an object that does not exist, Corrupt one of another
// length, Busy one that the service did not return.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	return s.each(ctx, len(items), func(i int) error {
		it := &items[i]
		it.Status = pool.Busy
		if !remote.Valid(&it.Key) {
			it.Status = pool.Invalid
			return nil
		}
		err := s.get(ctx, it)
		if errors.Is(err, errLength) {
			it.Status = pool.Corrupt
			return nil
		}
		switch s.judgeRead(ctx, err) {
		case done:
			it.Status = pool.OK
		case missing:
			it.Status = pool.Missing
		case silence:
			return err
		}
		return nil
	})
}

// get reads an object. It asks for one byte more than the object should have.
func (s *Store) get(ctx context.Context, it *pool.Item) error {
	var o minio.GetObjectOptions
	if err := o.SetRange(0, int64(len(it.Data))); err != nil {
		return err
	}
	r, info, _, err := s.core.GetObject(ctx, s.o.Bucket, s.name(&it.Key), o)
	if minio.ToErrorResponse(err).StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return errLength // it is empty
	}
	if err != nil {
		return err
	}
	defer r.Close()
	if info.Size != int64(len(it.Data)) {
		return errLength
	}
	_, err = io.ReadFull(r, it.Data)
	return err
}

// Put implements pool.Store. Busy is an item that the service did not take.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	return s.each(ctx, len(items), func(i int) error {
		it := &items[i]
		it.Status = pool.Busy
		if !remote.Valid(&it.Key) || int64(len(it.Data)) > maxValue {
			it.Status = pool.Invalid
			return nil
		}
		return s.put(ctx, it)
	})
}

func (s *Store) put(ctx context.Context, it *pool.Item) error {
	if s.plain.Load() {
		if there, err := s.there(ctx, it); there || err != nil {
			return err
		}
	}
	body := &body{rest: it.Data}
	defer body.end()
	o := minio.PutObjectOptions{ContentType: "application/octet-stream", DisableMultipart: true}
	if !s.plain.Load() {
		o.SetMatchETagExcept("*")
	}
	_, err := s.core.Client.PutObject(ctx, s.o.Bucket, s.name(&it.Key), body, int64(len(it.Data)), o)
	switch s.judge(ctx, err) {
	case done:
		it.Status = pool.OK
	case exists:
		it.Status = pool.Exists
	case unknown:
		if !s.plain.Swap(true) {
			return s.put(ctx, it)
		}
	case silence:
		// A service may refuse an object that exists before it has read the body, and close the
		// connection. That looks like no answer.
		if there, failed := s.there(ctx, it); !there {
			return errors.Join(err, failed)
		}
	}
	return nil
}

// there reports whether an item is stored already. It is asked before a put if the service does not
// support conditional writes. Two concurrent writers may then both write, one after the other; each
// object is complete in any case.
func (s *Store) there(ctx context.Context, it *pool.Item) (bool, error) {
	_, err := s.core.StatObject(ctx, s.o.Bucket, s.name(&it.Key), minio.StatObjectOptions{})
	switch s.judgeRead(ctx, err) {
	case done:
		it.Status = pool.Exists
	case silence:
		return false, err
	}
	return it.Status == pool.Exists, nil
}

// body is the body of a request. After end it does not read the data, which then belongs to the
// caller of Put, even if the transport still asks for it.
type body struct {
	mu   sync.Mutex
	rest []byte
	over bool
}

var errOver = errors.New("s3: the call has ended")

func (b *body) Read(p []byte) (n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return 0, errOver
	}
	n = copy(p, b.rest)
	b.rest = b.rest[n:]
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (b *body) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over, b.rest = true, nil
}
