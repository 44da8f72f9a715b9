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

// errDamaged is wrapped by the error for an object that is not what was stored.
var errDamaged = errors.New("damaged")

// Get implements pool.Store. An item that the service did not return is Missing.
func (s *Store) Get(ctx context.Context, items []pool.Item) error {
	return s.each(ctx, len(items), func(i int) error {
		it := &items[i]
		it.Status = pool.Missing
		if !remote.Valid(&it.Key) {
			it.Status = pool.Invalid
			return nil
		}
		err := s.get(ctx, it)
		if errors.Is(err, errDamaged) {
			it.Status = pool.Corrupt
			s.count[countCorrupt].Add(1)
			_ = s.remove(ctx, &it.Key) // so that it can be stored again; a failure does not change the status
			return nil
		}
		switch s.judgeRead(ctx, err) {
		case done:
			it.Status = pool.OK
		case silence:
			return err
		}
		return nil
	})
}

// get reads an object, and no more of it than it should have.
func (s *Store) get(ctx context.Context, it *pool.Item) error {
	var o minio.GetObjectOptions
	want := int64(pool.ValueHeader + len(it.Data))
	if err := o.SetRange(0, want-1); err != nil {
		return err
	}
	r, info, _, err := s.core.GetObject(ctx, s.o.Bucket, s.name(&it.Key), o)
	if minio.ToErrorResponse(err).StatusCode == http.StatusRequestedRangeNotSatisfiable {
		return fmt.Errorf("%w: empty", errDamaged)
	}
	if err != nil {
		return err
	}
	defer r.Close()
	if info.Size != want {
		return fmt.Errorf("%w: %d bytes of the first %d", errDamaged, info.Size, want)
	}
	header := make([]byte, pool.ValueHeader)
	if _, err := io.ReadFull(r, header); err != nil {
		return err
	}
	if err := pool.CheckValueHeader(header, &it.Key, len(it.Data)); err != nil {
		return fmt.Errorf("%w: %w", errDamaged, err)
	}
	if _, err := io.ReadFull(r, it.Data); err != nil {
		return err
	}
	if err := pool.CheckValue(header, &it.Key, it.Data); err != nil {
		return fmt.Errorf("%w: %w", errDamaged, err)
	}
	return nil
}

// Put implements pool.Store. Busy is an item that the service did not take.
func (s *Store) Put(ctx context.Context, items []pool.Item) error {
	return s.each(ctx, len(items), func(i int) error {
		it := &items[i]
		it.Status = pool.Busy
		if !remote.Valid(&it.Key) || int64(len(it.Data)) > maxValue-pool.ValueHeader {
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
	body := &body{rest: [2][]byte{pool.AppendValueHeader(nil, &it.Key, it.Data), it.Data}}
	defer body.end()
	o := minio.PutObjectOptions{ContentType: "application/octet-stream", DisableMultipart: true}
	if !s.plain.Load() {
		o.SetMatchETagExcept("*")
	}
	size := int64(pool.ValueHeader + len(it.Data))
	_, err := s.core.Client.PutObject(ctx, s.o.Bucket, s.name(&it.Key), body, size, o)
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
	rest [2][]byte
	over bool
}

var errOver = errors.New("s3: the call has ended")

func (b *body) Read(p []byte) (n int, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.over {
		return 0, errOver
	}
	for i := range b.rest {
		got := copy(p[n:], b.rest[i])
		n, b.rest[i] = n+got, b.rest[i][got:]
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (b *body) end() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over, b.rest = true, [2][]byte{}
}
