package s3

import (
	"context"
	"errors"
	"io"
	"sync"

	"github.com/minio/minio-go/v7"

	"github.com/kvagent/kvagent/pool"
	"github.com/kvagent/kvagent/pool/remote"
)

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
	body := newBody(pool.AppendValueHeader(nil, &it.Key, it.Data), it.Data)
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
		s.stock.Add(1, size)
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

func newBody(header, data []byte) *body { return &body{rest: [2][]byte{header, data}} }

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
