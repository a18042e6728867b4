"""Data sets of several domains as LightningDataModules."""

from jdfl_lightning.data.base import DomainDataModule as DomainDataModule
from jdfl_lightning.data.digits import DigitsDomains as DigitsDomains
from jdfl_lightning.data.folder import ImageFolderDomains as ImageFolderDomains
from jdfl_lightning.data.hub import HubDomains as HubDomains
from jdfl_lightning.data.office_caltech import OfficeCaltech as OfficeCaltech
from jdfl_lightning.data.pacs import PACS as PACS
from jdfl_lightning.data.real_digits import RealDigits as RealDigits
from jdfl_lightning.data.site_folders import SiteFolders as SiteFolders
