package peer

import (
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/kvagent/kvagent/pool/peer/seal"
)

// The handshake is the same with a shared key and with certificates; with these, the key is one
// that TLS derives for this connection alone:
//
//	client ── HELLO versions, timeout, nonce ──────────────▶ server
//	client ◀─ CHALLENGE version, timeout, nonce, proof ───── server
//	client ── PROOF ───────────────────────────────────────▶ server
//	client ◀─ WELCOME, the first frame with tags ───────── server
//
// A proof is derived by HKDF-SHA256 from the key, HELLO, CHALLENGE and a label. Each side's label
// is another one, so that a proof cannot be sent back, and both nonces are new, so that none can be
// replayed. The keys of the seals, one for each direction, are derived from the same, with labels
// of their own.
const (
	labelServer   = "kvagent peer 3: server"
	labelClient   = "kvagent peer 3: client"
	labelToServer = "kvagent peer 3: frames to server"
	labelToClient = "kvagent peer 3: frames to client"
	labelTLS      = "EXPORTER-kvagent-peer-3"
)

// maxHandshake bounds what an unauthenticated peer can make this side read, bytes. Certificates are
// the most of it.
const maxHandshake = 32 << 10

// transcript is what both sides have sent before the proofs.
type transcript struct{ key, hello, challenge []byte }

// derive returns the bytes that only a holder of the key can make for this handshake and label: a
// proof, or the key of a seal. The salt is all that was said before the proofs.
func (t *transcript) derive(label string) []byte {
	salt := append(append([]byte(nil), t.hello...), t.challenge[:challengeBytes-proofBytes]...)
	b, err := hkdf.Key(sha256.New, t.key, salt, label, seal.KeyBytes)
	if err != nil {
		panic(err) // of a length beyond HKDF's
	}
	return b
}

// gate counts what is read before a connection is authenticated.
type gate struct {
	net.Conn
	left int // bytes; negative: the gate is open
}

var errHandshakeSize = fmt.Errorf("more than %d bytes before it was authenticated", maxHandshake)

func (g *gate) Read(p []byte) (int, error) {
	if g.left < 0 {
		return g.Conn.Read(p)
	}
	if g.left == 0 {
		return 0, errHandshakeSize
	}
	n, err := g.Conn.Read(p[:min(len(p), g.left)])
	g.left -= n
	return n, err
}

// accepted authenticates the client of a connection. It calls begun when the client has said
// something that only an agent says.
func accepted(raw net.Conn, cfg *Config, begun func()) (*conn, error) {
	if err := raw.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return nil, err
	}
	secured, key, err := cfg.Auth.secure(context.Background(), raw, "")
	if err != nil {
		return nil, err
	}
	b, err := bare(secured, kindHello)
	if err != nil {
		return nil, err
	}
	h, err := parseHello(b)
	if err != nil {
		return nil, err
	}
	begun()
	if h.low > version || h.high < version {
		err = fmt.Errorf("versions %d to %d, this side speaks %d", h.low, h.high, version)
		return nil, errors.Join(err, sendBare(secured, kindError, []byte(err.Error())))
	}
	ch := challenge{version: version, timeout: cfg.Timeout}
	_, _ = rand.Read(ch.nonce[:])
	t := transcript{key, b, ch.encode()}
	copy(ch.proof[:], t.derive(labelServer))
	t.challenge = ch.encode()
	if err = sendBare(secured, kindChallenge, t.challenge); err != nil {
		return nil, err
	}
	proof, err := bare(secured, kindProof)
	if err != nil {
		return nil, err
	}
	if !hmac.Equal(proof, t.derive(labelClient)) {
		return nil, fmt.Errorf("%w: the client has another key", ErrAuth)
	}
	c := open(secured, &t, labelToServer, labelToClient, cfg.Timeout, h.timeout)
	return c, c.send(kindWelcome, 0, nil)
}

// dialled authenticates the server of a connection to addr, until ctx ends.
func dialled(ctx context.Context, raw net.Conn, addr string, auth *Auth, timeout time.Duration) (*conn, error) {
	if deadline, ok := ctx.Deadline(); ok {
		if err := raw.SetDeadline(deadline); err != nil {
			return nil, err
		}
	}
	defer context.AfterFunc(ctx, func() { _ = raw.SetDeadline(time.Unix(1, 0)) })()
	secured, key, err := auth.secure(ctx, raw, addr)
	if err != nil {
		return nil, err
	}
	h := hello{low: version, high: version, timeout: timeout}
	_, _ = rand.Read(h.nonce[:])
	t := transcript{key: key, hello: h.encode()}
	if err = sendBare(secured, kindHello, t.hello); err != nil {
		return nil, err
	}
	if t.challenge, err = bare(secured, kindChallenge); err != nil {
		return nil, err
	}
	ch, err := parseChallenge(t.challenge)
	if err != nil {
		return nil, err
	}
	if ch.version != version {
		return nil, malformed("version %d was not offered", ch.version)
	}
	if !hmac.Equal(ch.proof[:], t.derive(labelServer)) {
		return nil, fmt.Errorf("%w: the peer has another key", ErrAuth)
	}
	if err = sendBare(secured, kindProof, t.derive(labelClient)); err != nil {
		return nil, err
	}
	c := open(secured, &t, labelToClient, labelToServer, timeout, ch.timeout)
	w, err := c.next()
	if err == nil && w.kind != kindWelcome {
		err = malformed("kind %d instead of WELCOME", w.kind)
	}
	return c, err
}

// secure returns the connection that frames are sent over, and the key of its proofs.
func (a *Auth) secure(ctx context.Context, raw net.Conn, addr string) (net.Conn, []byte, error) {
	if a.tls == nil {
		return raw, a.key, nil
	}
	g := &gate{raw, maxHandshake}
	var c *tls.Conn
	if addr == "" {
		c = tls.Server(g, a.tls)
	} else {
		name, _, err := net.SplitHostPort(addr)
		if err != nil {
			return nil, nil, err
		}
		cfg := a.tls.Clone()
		cfg.ServerName = name
		c = tls.Client(g, cfg)
	}
	if err := c.HandshakeContext(ctx); err != nil {
		return nil, nil, fmt.Errorf("%w: %w", ErrAuth, err)
	}
	g.left = -1
	state := c.ConnectionState()
	key, err := state.ExportKeyingMaterial(labelTLS, nil, sha256.Size)
	return c, key, err
}

// open returns the connection after the proofs.
func open(raw net.Conn, t *transcript, in, out string, timeout, theirs time.Duration) *conn {
	_ = raw.SetDeadline(time.Time{})
	_, isTLS := raw.(*tls.Conn)
	return &conn{
		raw: raw, direct: !isTLS, timeout: timeout, beat: theirs / 4, in: seal.New(t.derive(in)),
		out: seal.New(t.derive(out)),
	}
}

// sendBare writes a frame without tags.
func sendBare(c net.Conn, k kind, payload []byte) error {
	b := make([]byte, headerBytes, headerBytes+len(payload))
	(&header{kind: k, length: uint32(len(payload))}).put(b)
	_, err := c.Write(append(b, payload...))
	return err
}

// bare reads a frame without tags, of one kind.
func bare(c net.Conn, k kind) ([]byte, error) {
	var b [headerBytes]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return nil, err
	}
	h, err := parseHeader(b[:])
	if err != nil {
		return nil, err
	}
	if h.kind != k && h.kind != kindError || h.id != 0 || [macBytes]byte(b[macAt:]) != [macBytes]byte{} {
		return nil, malformed("kind %d instead of %d", h.kind, k)
	}
	p := make([]byte, h.length) // bounded by maxLength
	if _, err = io.ReadFull(c, p); err == nil && h.kind == kindError {
		err = fmt.Errorf("the peer says: %q", p)
	}
	return p, err
}
