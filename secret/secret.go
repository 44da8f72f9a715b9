// Package secret reads keys, passwords and certificates from files that are small.
package secret

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"
	"syscall"
)

// MaxBytes bounds the size of a file.
const MaxBytes = 1 << 20

// Read reads a file of at most MaxBytes. Its errors do not name the file, as the caller does.
func Read(path string) ([]byte, error) { return read(path, func(fs.FileInfo) error { return nil }) }

// ReadPrivate reads a file that only its owner may read, or also a group of this process, as of a
// mounted Kubernetes secret.
func ReadPrivate(path string) ([]byte, error) {
	return read(path, func(info fs.FileInfo) error {
		groups, err := os.Getgroups()
		if err != nil {
			return err
		}
		return private(info, append(groups, os.Getegid()))
	})
}

func read(path string, check func(fs.FileInfo) error) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, pathless(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil {
		err = check(info)
	}
	if err != nil {
		return nil, pathless(err)
	}
	text, err := io.ReadAll(io.LimitReader(f, MaxBytes+1))
	if err == nil && len(text) > MaxBytes {
		err = fmt.Errorf("more than %d bytes, allowed: at most that many", MaxBytes)
	}
	return text, pathless(err)
}

// private returns an error for a file that others than its owner and these groups may read, or
// others than its owner write.
func private(info fs.FileInfo, groups []int) error {
	group := -1
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		group = int(st.Gid)
	}
	switch perm := info.Mode().Perm(); {
	case !info.Mode().IsRegular() || perm&0o037 != 0:
		return fmt.Errorf("is %v, allowed: a regular file with mode 0600 or 0400, or 0640 or 0440 if its group is one "+
			"of the agent's", info.Mode())
	case perm&0o040 != 0 && !slices.Contains(groups, group):
		return fmt.Errorf("is %v of group %d, allowed: mode 0600 or 0400, or a group of the agent (%v)", info.Mode(),
			group, groups)
	}
	return nil
}

// Authorities reads the certificates, in PEM, of those who sign other certificates.
func Authorities(path string) (*x509.CertPool, error) {
	text, err := Read(path)
	if err != nil {
		return nil, fmt.Errorf("authorities %s: %w", path, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("authorities %s: no certificate in it, allowed: PEM", path)
	}
	return pool, nil
}

// Pair reads a certificate and its private key, both in PEM.
func Pair(cert, key string) (pair tls.Certificate, err error) {
	certificate, err := Read(cert)
	if err != nil {
		return pair, fmt.Errorf("certificate %s: %w", cert, err)
	}
	private, err := Read(key)
	if err != nil {
		return pair, fmt.Errorf("key %s: %w", key, err)
	}
	if pair, err = tls.X509KeyPair(certificate, private); err != nil {
		return pair, fmt.Errorf("certificate %s, key %s: %w", cert, key, err)
	}
	return pair, nil
}

// pathless drops the path of a file's error.
func pathless(err error) error {
	if p := (*fs.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}
